// SPDX-License-Identifier: MIT OR Apache-2.0
//! Keys with signatures: what they add, take away and check, and what they say when it is wrong.

use connectx::ifc::command::{create_psv_in, create_psv_out, header, modify_qp_in};
use connectx::ifc::context::{mkc, qpc};
use connectx::ifc::event::kind;
use connectx::ifc::opcode;
use connectx::ifc::wqe::{
    bsf, bsf_inl, cqe_opcode, mkey_mask, send, set_psv, sig_err_cqe, syndrome, umr_ctrl,
};
use connectx::objects::transition::optional;

use crate::guest::{Guest, Pair, Settings, Side, guests, input, pointer, remote, status};

const BLOCK: usize = 512;
/// T10-DIF in the place of a format, which is inline then.
const T10: u64 = 0;
const CRC32: u64 = 0x22;
const CRC32C: u64 = 0x42;

/// Makes a PSV.
fn psv(guest: &mut Guest, pd: u32) -> u32 {
    let mut bytes = input(opcode::CREATE_PSV, 16);
    create_psv_in::num_psv.set(&mut bytes, 1);
    create_psv_in::pd.set(&mut bytes, u64::from(pd));
    create_psv_out::psv0_index.get32(&guest.ok(bytes, 32))
}

/// A key with signatures over the start of a side's memory.
struct Signed {
    key: u32,
    psvs: [u32; 2],
    /// Format, transient signature.
    memory: Option<(u64, u64)>,
    wire: Option<(u64, u64)>,
    /// Bytes of memory that it covers.
    len: u64,
    armed: bool,
}

impl Signed {
    fn new(guest: &mut Guest, pd: u32) -> Self {
        let key = guest.window_with(pd, |context| {
            mkc::bsf_en.set(context, 1);
            mkc::bsf_octword_size.set(context, 4);
        });
        Self {
            key,
            psvs: [psv(guest, pd), psv(guest, pd)],
            memory: None,
            wire: None,
            len: 0,
            armed: false,
        }
    }

    fn bsf(&self) -> [u8; bsf::SIZE] {
        let mut b = [0; bsf::SIZE];
        bsf::bsf_size.set(&mut b, 2);
        bsf::check_byte_mask.set(&mut b, 0xff);
        bsf::raw_data_size.set(&mut b, u64::from(u32::MAX));
        let inline = |raw: &mut [u8]| {
            bsf_inl::valid.set(raw, 1);
            bsf_inl::repeat_block.set(raw, 1);
            bsf_inl::sig_type.set(raw, 1);
            bsf_inl::inc_reftag.set(raw, 1);
            bsf_inl::dif_app_bitmask_check.set(raw, 0xffff);
        };
        if let Some((format, _)) = self.memory {
            bsf::mem_bs_selector.set(&mut b, 1);
            bsf::m_bfs.set(&mut b, format);
            bsf::m_psv.set(&mut b, self.psvs[0].into());
            inline(bsf::m_inl.bytes_mut(&mut b));
        }
        if let Some((format, _)) = self.wire {
            bsf::w_bfs.set(&mut b, format);
            bsf::w_psv.set(&mut b, self.psvs[1].into());
            inline(bsf::w_inl.bytes_mut(&mut b));
            if self.memory.is_some_and(|(memory, _)| memory == format) {
                bsf::sbs.set(&mut b, 1);
                bsf::wire.set(&mut b, 0xff);
            } else {
                bsf::wire.set(&mut b, 1);
            }
        }
        b
    }

    /// Segments of the UMR that gives it its memory and `b`.
    fn update(&self, under: u32, at: u64, b: &[u8]) -> Vec<[u8; 16]> {
        let mut control = [0; umr_ctrl::SIZE];
        umr_ctrl::is_inline.set(&mut control, 1);
        umr_ctrl::xlt_octowords.set(&mut control, 4);
        umr_ctrl::bsf_octowords.set(&mut control, b.len() as u64 / 16);
        let mask = mkey_mask::LEN
            | mkey_mask::SIG_ERR
            | mkey_mask::BSF_ENABLE
            | mkey_mask::LW
            | mkey_mask::RR
            | mkey_mask::RW
            | mkey_mask::A
            | mkey_mask::FREE;
        umr_ctrl::mkey_mask.set(&mut control, mask);
        let mut context = [0; mkc::SIZE];
        for field in [mkc::lw, mkc::rr, mkc::rw, mkc::a, mkc::bsf_en] {
            field.set(&mut context, 1);
        }
        mkc::expected_sigerr_count.set(&mut context, u64::from(self.armed));
        mkc::len.set(&mut context, self.len);
        let mut entries = [0; 64];
        entries[..16].copy_from_slice(&pointer(self.len as u32, under, at));
        let bytes = [&control[..], &context[..], &entries[..], b].concat();
        bytes.chunks(16).map(|c| c.try_into().unwrap()).collect()
    }

    /// Gives the key its memory and its signatures.
    fn bind(&mut self, guest: &Guest, side: &mut Side) {
        self.armed = !self.armed;
        let segments = self.update(side.key, side.at, &self.bsf());
        side.qp.post(guest, send::UMR, self.key, &segments);
        assert_eq!(side.send.wait(guest).opcode, cqe_opcode::REQ);
        for (number, domain) in self.psvs.into_iter().zip([self.memory, self.wire]) {
            let Some((_, transient)) = domain else {
                continue;
            };
            let mut segment = [0; set_psv::SIZE];
            set_psv::psv_index.set(&mut segment, number.into());
            set_psv::transient_signature.set(&mut segment, transient);
            side.qp.post(guest, send::SET_PSV, 0, &[segment]);
            assert_eq!(side.send.wait(guest).opcode, cqe_opcode::REQ);
        }
    }
}

/// Blocks of data that differ.
fn blocks(count: usize) -> Vec<u8> {
    (0..count * BLOCK).map(|i| (i % 253) as u8).collect()
}

/// Two blocks, their signatures behind each.
fn interleaved(data: &[u8], signature: impl Fn(usize, &[u8]) -> Vec<u8>) -> Vec<u8> {
    let each = data.chunks(BLOCK).enumerate();
    each.flat_map(|(i, block)| [block.to_vec(), signature(i, block)].concat())
        .collect()
}

/// T10-DIF as the standard has it: bit by bit.
fn dif(seed: u16, application: u16, reference: u32) -> impl Fn(usize, &[u8]) -> Vec<u8> {
    move |i, block| {
        let guard = block.iter().fold(seed, |crc, byte| {
            (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| {
                (crc << 1) ^ if crc >> 15 == 1 { 0x8bb7 } else { 0 }
            })
        });
        let mut bytes = guard.to_be_bytes().to_vec();
        bytes.extend(application.to_be_bytes());
        bytes.extend((reference + i as u32).to_be_bytes());
        bytes
    }
}

/// A reflected CRC of 32 bits, bit by bit.
fn crc(polynomial: u32) -> impl Fn(usize, &[u8]) -> Vec<u8> {
    move |_, block| {
        let crc = block.iter().fold(u32::MAX, |crc, byte| {
            (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
                (crc >> 1) ^ if crc & 1 == 1 { polynomial } else { 0 }
            })
        });
        (!crc).to_le_bytes().to_vec()
    }
}

const SEED: u64 = u64::MAX << 32;
const TAGS: u64 = 0xffff_abcd_0000_0009;
const POLYNOMIAL: u32 = 0xedb8_8320;
const POLYNOMIAL_C: u32 = 0x82f6_3b78;

/// What comes when data with the signatures of `memory` is written through a key, to plain memory.
fn sent(
    memory: Option<(u64, u64)>,
    wire: Option<(u64, u64)>,
    stored: &[u8],
    len: usize,
) -> (Vec<u8>, Option<Vec<u8>>) {
    let Pair { mut guests, sides } = Pair::new();
    let [mut a, b] = sides;
    let mut key = Signed::new(&mut guests[0], a.pd);
    (key.memory, key.wire, key.len) = (memory, wire, stored.len() as u64);
    guests[0].ram.set(a.at, stored);
    key.bind(&guests[0], &mut a);
    let segments = [remote(b.at, b.key), pointer(len as u32, key.key, 0)];
    a.qp.post(&guests[0], send::RDMA_WRITE, 0, &segments);
    let mut cqe = a.send.wait(&guests[0]);
    let error = (cqe.opcode == cqe_opcode::SIG_ERR).then(|| {
        let entry = a.send.last(&guests[0]);
        cqe = a.send.wait(&guests[0]);
        entry
    });
    assert_eq!((cqe.opcode, cqe.syndrome), (cqe_opcode::REQ, 0));
    (guests[1].ram.get(b.at, len), error)
}

#[test]
fn signatures_go_to_the_wire_or_stay() {
    // More than a packet, and blocks across packets.
    let data = blocks(9);
    let crcs = interleaved(&data, crc(POLYNOMIAL));
    let crcs_c = interleaved(&data, crc(POLYNOMIAL_C));
    let difs = interleaved(&data, dif(0xffff, 0xabcd, 9));
    let none = None::<(u64, u64)>;
    for (memory, wire, stored, comes) in [
        (none, Some((CRC32, SEED)), &data, &crcs),
        (none, Some((CRC32C, SEED)), &data, &crcs_c),
        (none, Some((T10, TAGS)), &data, &difs),
        (Some((CRC32, SEED)), none, &crcs, &data),
        (Some((T10, TAGS)), none, &difs, &data),
        (Some((T10, TAGS)), Some((T10, TAGS)), &difs, &difs),
        (Some((T10, TAGS)), Some((CRC32, SEED)), &difs, &crcs),
        (Some((CRC32C, SEED)), Some((T10, TAGS)), &crcs_c, &difs),
    ] {
        let (came, error) = sent(memory, wire, stored, comes.len());
        assert_eq!(error, None, "{memory:x?} {wire:x?}");
        assert!(came == *comes, "{memory:x?} {wire:x?}");
    }
}

#[test]
fn what_is_received_is_checked_and_gets_its_own_signatures() {
    let data = blocks(9);
    let crcs = interleaved(&data, crc(POLYNOMIAL));
    let difs = interleaved(&data, dif(0xffff, 0xabcd, 9));
    for (memory, wire, comes, stored) in [
        (Some((CRC32, SEED)), None, &data, &crcs),
        (None, Some((CRC32, SEED)), &crcs, &data),
        (Some((T10, TAGS)), Some((T10, TAGS)), &difs, &difs),
        (Some((CRC32, SEED)), Some((T10, TAGS)), &difs, &crcs),
    ] {
        for wrong in [None, Some(3)] {
            let Pair { mut guests, sides } = Pair::new();
            let [mut a, mut b] = sides;
            let mut key = Signed::new(&mut guests[1], b.pd);
            (key.memory, key.wire, key.len) = (memory, wire, stored.len() as u64);
            key.bind(&guests[1], &mut b);
            let mut comes = comes.clone();
            if let Some(at) = wrong {
                comes[at] ^= 0xff;
            }
            guests[0].ram.set(a.at, &comes);
            // In pieces that cut blocks and signatures.
            let cut = 514;
            for (from, to) in [(0, cut), (cut, comes.len())] {
                b.qp.receive(&guests[1], key.key, from as u64, (to - from) as u32);
                let piece = pointer((to - from) as u32, a.key, a.at + from as u64);
                a.qp.post(&guests[0], send::SEND, 0, &[piece]);
                assert_eq!(a.send.wait(&guests[0]).syndrome, 0);
            }
            let mut first = b.receive.wait(&guests[1]);
            let told = first.opcode == cqe_opcode::SIG_ERR;
            if !told {
                first = b.receive.wait(&guests[1]);
            }
            let told = told || first.opcode == cqe_opcode::SIG_ERR;
            assert_eq!(
                told,
                wrong.is_some() && wire.is_some(),
                "{memory:x?} {wire:x?}"
            );
            if wrong.is_none() {
                assert!(
                    guests[1].ram.get(b.at, stored.len()) == *stored,
                    "{memory:x?} {wire:x?}"
                );
            }
        }
    }
}

#[test]
fn a_wrong_signature_is_told_once_with_what_was_expected() {
    let data = blocks(3);
    let right = interleaved(&data, dif(0xffff, 0xabcd, 9));
    // The second block's: guard, application tag, reference tag.
    for (at, bit) in [(0, 13), (2, 12), (4, 11)] {
        let mut stored = right.clone();
        stored[520 + BLOCK + at] ^= 0xff;
        stored[1040 + BLOCK + at] ^= 0xff;
        let (came, error) = sent(Some((T10, TAGS)), None, &stored, data.len());
        assert_eq!(came, data, "the data goes on");
        let e = error.unwrap();
        assert_eq!(sig_err_cqe::syndrome.get(&e), 1 << bit);
        assert_eq!(
            (sig_err_cqe::sig_type.get(&e), sig_err_cqe::domain.get(&e)),
            (0, 1)
        );
        assert_eq!(sig_err_cqe::err_offset.get(&e), 520);
        let whole = |high: connectx::ifc::Field, low: connectx::ifc::Field| {
            [high.get32(&e).to_be_bytes(), low.get32(&e).to_be_bytes()].concat()
        };
        let expected = whole(
            sig_err_cqe::expected_trans_sig,
            sig_err_cqe::expected_reftag,
        );
        let actual = whole(sig_err_cqe::actual_trans_sig, sig_err_cqe::actual_reftag);
        assert_eq!(expected, right[520 + BLOCK..1040]);
        assert_eq!(actual, stored[520 + BLOCK..1040]);
    }
}

#[test]
fn a_peer_reads_through_signatures_and_an_error_is_asked_for_again() {
    let Pair { mut guests, sides } = Pair::new();
    let [mut a, mut b] = sides;
    let data = blocks(2);
    let mut key = Signed::new(&mut guests[1], b.pd);
    key.memory = Some((CRC32, SEED));
    key.len = 1032;
    // There are no signatures.
    guests[1].ram.set(b.at, &data);
    for told in [true, true] {
        key.bind(&guests[1], &mut b);
        for told in [told, false] {
            let segments = [remote(0, key.key), pointer(1024, a.key, a.at)];
            a.qp.post(&guests[0], send::RDMA_READ, 0, &segments);
            assert_eq!(a.send.wait(&guests[0]).syndrome, 0);
            let opcode = b.receive.poll(&guests[1]).map(|cqe| cqe.opcode);
            assert_eq!(opcode, told.then_some(cqe_opcode::SIG_ERR));
        }
    }
    assert_eq!(guests[1].count("signature_errors"), 2);
}

#[test]
fn a_queue_pair_can_stop_at_a_wrong_signature() {
    let mut guests = guests(2);
    let mut sides = [Side::new(&mut guests[0]), Side::new(&mut guests[1])];
    for i in 0..2 {
        let settings = Settings::to(2 - i as u16, sides[1 - i].qp.qpn);
        let (guest, qp) = (&mut guests[i], &sides[i].qp);
        qp.to_init(guest, settings);
        let mut bytes = input(opcode::INIT2INIT_QP, 0x110);
        header::object.set(&mut bytes, qp.qpn.into());
        modify_qp_in::opt_param_mask.set(&mut bytes, optional::DRAIN_SIGERR.into());
        qpc::drain_sigerr.set(modify_qp_in::qpc.bytes_mut(&mut bytes), 1);
        assert_eq!(status(&guest.command(bytes, 16)), 0);
        qp.to_ready_to_receive(guest, settings);
        qp.to_ready_to_send(guest, settings);
    }
    let [a, b] = &mut sides;
    let mut key = Signed::new(&mut guests[0], a.pd);
    key.memory = Some((CRC32, SEED));
    key.len = 516;
    guests[0].ram.set(a.at, &blocks(1));
    key.bind(&guests[0], a);
    b.qp.receive(&guests[1], b.key, b.at + 4096, 16);
    let write = [remote(b.at, b.key), pointer(512, key.key, 0)];
    a.qp.put(&guests[0], send::RDMA_WRITE, 0, 0, &write);
    a.qp.put(&guests[0], send::SEND, 0x08, 0, &[pointer(16, a.key, a.at)]);
    a.qp.ring(&guests[0], guests[0].uar);
    assert_eq!(guests[0].event(), Some((kind::SQ_DRAINED, a.qp.qpn)));
    // What depends on the data has not been sent, and can be posted anew.
    assert_eq!(a.qp.state(&mut guests[0]), 5);
    assert_eq!(a.send.poll(&guests[0]).unwrap().opcode, cqe_opcode::SIG_ERR);
    assert_eq!(
        (a.send.poll(&guests[0]), b.receive.poll(&guests[1])),
        (None, None)
    );
    a.qp.producer -= 1;
    a.qp.put(&guests[0], send::NOP, 0x08, 0, &[]);
    let answer = [pointer(16, a.key, a.at)];
    a.qp.put(&guests[0], send::SEND, 0x08, 0, &answer);
    a.qp.ring(&guests[0], guests[0].uar);
    assert_eq!(a.send.poll(&guests[0]), None);
    assert_eq!(a.qp.modify(&mut guests[0], opcode::SQD_RTS_QP, |_| {}), 0);
    for _ in 0..2 {
        assert_eq!(a.send.wait(&guests[0]).opcode, cqe_opcode::REQ);
    }
    assert_eq!(b.receive.wait(&guests[1]).bytes, 16);
    assert_eq!(b.receive.poll(&guests[1]), None);
}

/// The syndrome of a UMR that gives a key this BSF.
fn refused(f: impl Fn(&mut Vec<u8>)) -> u8 {
    let mut guest = guests(1).remove(0);
    let mut side = Side::new(&mut guest);
    side.qp.connect(&mut guest, Settings::to(1, side.qp.qpn));
    let mut key = Signed::new(&mut guest, side.pd);
    (key.memory, key.wire) = (Some((T10, TAGS)), Some((T10, TAGS)));
    key.len = 520;
    let mut b = key.bsf().to_vec();
    f(&mut b);
    let segments = key.update(side.key, side.at, &b);
    side.qp.post(&guest, send::UMR, key.key, &segments);
    side.send.wait(&guest).syndrome
}

#[test]
pub fn a_format_that_is_none_is_refused() {
    assert_eq!(refused(|_| {}), 0);
    for (field, value) in [
        (bsf::bsf_size, 3),
        (bsf::bsf_size, 1),
        (bsf::w_tfs_psv, 1),
        (bsf::m_tfs_psv, 1),
        (bsf::mem_bs_selector, 5),
        (bsf::mem_bs_selector, 0),
        (bsf::w_bfs, 0x32),
        (bsf::m_bfs, 0x21),
        (bsf::w_bfs, 0x22),
    ] {
        let syndrome = refused(|b| field.set(b, value));
        assert_eq!(syndrome, syndrome::MW_BIND, "{field:?} {value}");
    }
    for (field, value) in [
        (bsf_inl::valid, 0),
        (bsf_inl::repeat_block, 0),
        (bsf_inl::sig_type, 3),
        (bsf_inl::escape, 3),
    ] {
        let syndrome = refused(|b| field.set(bsf::m_inl.bytes_mut(b), value));
        assert_eq!(syndrome, syndrome::MW_BIND, "{field:?} {value}");
    }
    let too_long = refused(|b| b.resize(80, 0));
    assert_eq!(too_long, syndrome::LOCAL_QP_OP, "no room in the device");
}

#[test]
pub fn a_key_without_its_values_or_room_is_refused() {
    let mut guest = guests(1).remove(0);
    let mut side = Side::new(&mut guest);
    side.qp.connect(&mut guest, Settings::to(1, side.qp.qpn));
    let mut key = Signed::new(&mut guest, side.pd);
    (key.memory, key.len) = (Some((CRC32, SEED)), 516);
    key.bind(&guest, &mut side);
    let write = |key: &Signed, len| [remote(side.at + 8192, side.key), pointer(len, key.key, 0)];
    let segments = [write(&key, 513), write(&key, 512)];
    let [long, whole] = segments;
    side.qp.post(&guest, send::RDMA_WRITE, 0, &whole);
    assert_eq!(side.send.wait(&guest).opcode, cqe_opcode::SIG_ERR);
    assert_eq!(side.send.wait(&guest).syndrome, 0);
    // Of another domain, and none.
    let other = guest.alloc(opcode::ALLOC_PD);
    let foreign = psv(&mut guest, other);
    assert_ne!(guest.on_object(opcode::DEALLOC_PD, other), 0, "in use");
    assert_eq!(guest.on_object(opcode::DESTROY_PSV, key.psvs[0]), 0);
    assert_ne!(guest.on_object(opcode::DESTROY_PSV, key.psvs[0]), 0);
    side.qp.post(&guest, send::RDMA_WRITE, 0, &whole);
    assert_eq!(side.send.wait(&guest).syndrome, syndrome::LOCAL_PROT);
    for (op, immediate, segments) in [
        (send::RDMA_WRITE, 0, long.to_vec()),
        (send::SET_PSV, 0, {
            let mut segment = [0; set_psv::SIZE];
            set_psv::psv_index.set(&mut segment, foreign.into());
            vec![segment]
        }),
        (send::ATOMIC_FA, 0, {
            let (at, operands) = (remote(0, key.key), [0; 16]);
            vec![at, operands, pointer(8, side.key, side.at + 8192)]
        }),
    ] {
        assert_eq!(side.qp.modify(&mut guest, opcode::TO_RST_QP, |_| {}), 0);
        side.qp.producer = 0;
        side.qp.connect(&mut guest, Settings::to(1, side.qp.qpn));
        side.qp.post(&guest, op, immediate, &segments);
        assert_ne!(side.send.wait(&guest).syndrome, 0, "{op:#x}");
    }
    // A key that has no room for a BSF, one that wants too much, and more values than a command makes.
    key.key = guest.window(side.pd);
    assert_eq!(side.qp.modify(&mut guest, opcode::TO_RST_QP, |_| {}), 0);
    side.qp.producer = 0;
    side.qp.connect(&mut guest, Settings::to(1, side.qp.qpn));
    let segments = key.update(side.key, side.at, &key.bsf());
    side.qp.post(&guest, send::UMR, key.key, &segments);
    assert_eq!(side.send.wait(&guest).syndrome, syndrome::MW_BIND);
    let mut create = input(opcode::CREATE_MKEY, 0x110);
    let context = connectx::ifc::command::create_mkey_in::mkc.bytes_mut(&mut create);
    for (field, value) in [
        (mkc::free, 1),
        (mkc::access_mode_1_0, 2),
        (mkc::pd, u64::from(side.pd)),
        (mkc::bsf_en, 1),
        (mkc::bsf_octword_size, 5),
    ] {
        field.set(context, value);
    }
    assert_eq!(status(&guest.command(create, 16)), 3);
    for count in [0, 5] {
        let mut bytes = input(opcode::CREATE_PSV, 16);
        create_psv_in::num_psv.set(&mut bytes, count);
        create_psv_in::pd.set(&mut bytes, u64::from(side.pd));
        assert_eq!(status(&guest.command(bytes, 32)), 3);
    }
}
