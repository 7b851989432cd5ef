// SPDX-License-Identifier: MIT OR Apache-2.0
use super::*;

fn told(kind: &str, bytes: &[u8]) -> Explanation {
    explain(kind, Service::Rc, bytes).unwrap()
}

fn value<'a>(e: &'a Explanation, part: &str, field: &str) -> &'a str {
    let row = e
        .fields
        .iter()
        .find(|row| row.part == part && row.field == field);
    row.map(|row| row.value.as_str()).unwrap_or("missing")
}

/// RDMA WRITE of 8 bytes, WQE 5 of QP 0x1234, signalled: bytes as rdma-core's mlx5dv.h lays them out.
fn write() -> Vec<u8> {
    let mut wqe = vec![0, 0, 5, 8, 0, 0x12, 0x34, 3, 0, 0, 0, 8, 0, 0, 0, 0];
    wqe.extend(0x7f00_0000_1000u64.to_be_bytes());
    wqe.extend(0xabcdu32.to_be_bytes());
    wqe.extend([0; 4]);
    wqe.extend(8u32.to_be_bytes());
    wqe.extend(0x2233u32.to_be_bytes());
    wqe.extend(0x7f00_0000_2000u64.to_be_bytes());
    wqe
}

#[test]
fn a_good_write() {
    let e = told("wqe", &write());
    assert_eq!(e.problems, [""; 0]);
    assert_eq!(value(&e, "ctrl", "qpn"), "0x1234");
    assert_eq!(value(&e, "raddr", "rkey"), "0xabcd");
    assert_eq!(value(&e, "data", "address"), "0x7f0000002000");
    let text = e.to_string();
    assert!(
        text.contains("opcode") && text.contains("RDMA WRITE"),
        "{text}"
    );
    assert!(text.ends_with("nothing is wrong with it by itself\n"));
    let mut block = write();
    block.resize(64, 0xee);
    assert_eq!(
        told("wqe", &block).problems,
        [""; 0],
        "what follows the WQE is not part of it"
    );
}

#[test]
fn bad_wqes() {
    let problems = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut wqe = write();
        change(&mut wqe);
        told("wqe", &wqe).problems.join("\n")
    };
    assert!(problems(&|w| w[7] = 0).contains("ds = 0x0"));
    assert!(problems(&|w| w[7] = 4).contains("64 bytes, of which 48 are given"));
    assert!(problems(&|w| w[3] = 0x7f).contains("opcode = 0x7f"));
    assert!(problems(&|w| w[0x1f] = 1).contains("at byte 0x1f: 0x01"));
    assert!(
        problems(&|w| w[0x20..0x24].copy_from_slice(&0x8000_00ffu32.to_be_bytes()))
            .contains("byte_count")
    );
    assert!(
        problems(&|w| w.truncate(5)).contains("of which 5 are given")
            || problems(&|w| w.truncate(5)).contains("ds")
    );
}

#[test]
fn error_cqes_are_put_in_words() {
    // As the kernel prints one: remote access error of the RDMA WRITE at 0x0005 of QP 0x1234.
    let dump = "
        00000000: 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
        00000010: 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
        00000020: 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00
        00000030: 00 00 00 00 00 00 88 13 08 00 12 34 00 05 00 d0";
    let e = told("cqe", &hex::parse(dump).unwrap());
    let meaning = |field: &str| {
        e.fields
            .iter()
            .find(|row| row.field == field)
            .unwrap()
            .meaning
    };
    assert_eq!(meaning("opcode"), Some("a request has failed"));
    assert_eq!(meaning("syndrome"), Some("remote access error"));
    assert_eq!(meaning("send_opcode"), Some("RDMA WRITE"));
    assert_eq!(value(&e, "cqe", "wqe_counter"), "0x5");
    assert_eq!(e.problems, [""; 0]);
    let unused = [0xff; 64];
    let problems = told("cqe", &unused).problems.join("\n");
    assert!(problems.contains("has written"), "{problems}");
}

#[test]
fn contexts_are_checked() {
    let mut qpc = vec![0; context::qpc::SIZE];
    context::qpc::state.set(&mut qpc, 3);
    context::qpc::mtu.set(&mut qpc, 5);
    assert_eq!(told("qpc", &qpc).problems, [""; 0]);
    context::qpc::st.set(&mut qpc, 0xf);
    context::qpc::log_msg_max.set(&mut qpc, 31);
    context::qpc::dbr_addr.set(&mut qpc, 0x1004);
    let problems = told("qpc", &qpc).problems;
    assert_eq!(problems.len(), 3, "{problems:?}");
    let mut mkc = vec![0; context::mkc::SIZE];
    context::mkc::rw.set(&mut mkc, 1);
    context::mkc::start_addr.set(&mut mkc, u64::MAX);
    context::mkc::len.set(&mut mkc, 2);
    let problems = told("mkc", &mkc).problems;
    assert_eq!(problems.len(), 2, "{problems:?}");
}

#[test]
fn any_bytes_can_be_explained() {
    let mut x = 1u64;
    for len in [0, 1, 3, 15, 16, 17, 48, 63, 64, 65, 300, 2000] {
        for _ in 0..50 {
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (x >> 56) as u8
                })
                .collect();
            for (kind, _) in kinds() {
                for service in [Service::Rc, Service::Ud, Service::Xrc, Service::RegUmr] {
                    explain(kind, service, &bytes).unwrap().to_string();
                }
            }
        }
    }
    assert!(explain("qp", Service::Rc, &[]).unwrap_err().contains("qpc"));
}
