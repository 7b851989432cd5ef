// SPDX-License-Identifier: MIT OR Apache-2.0
//! An SR-IOV virtual function: what its driver finds less of, and that it works without.

use connectx::hca::{Hca, HcaConfig};
use connectx::ifc::cap::cmd_hca_cap as cap;
use connectx::ifc::command::{
    access_register_in, header, manage_pages_in, query_hca_cap_out, query_hca_vport_context_out,
    query_pages_out,
};
use connectx::ifc::context::hca_vport_context as port;
use connectx::ifc::opcode;
use connectx::log::Referee;
use connectx::wire::Fabric;

use crate::guest::{Guest, input, status};

/// `MLX5_REG_HOST_ENDIANNESS`.
const HOST_ENDIANNESS: u64 = 0x7004;

fn function(virtual_function: bool) -> Guest {
    let referee = Referee::in_memory();
    let fabric = Fabric::new(referee.clone());
    let config = HcaConfig {
        virtual_function,
        ..HcaConfig::numbered(0)
    };
    let mut guest = Guest::cold(Hca::new(&fabric, config), referee);
    guest.bring_up();
    guest
}

#[test]
pub fn a_virtual_function_manages_no_ports_and_its_pages_come_from_elsewhere() {
    for vf in [false, true] {
        let mut guest = function(vf);
        let mut query = input(opcode::QUERY_HCA_CAP, 16);
        header::op_mod.set(&mut query, 1);
        let caps = guest.ok(query, query_hca_cap_out::SIZE);
        let caps = query_hca_cap_out::capability.bytes(&caps);
        assert_eq!(cap::vport_group_manager.is_set(caps), !vf);

        let query = input(opcode::QUERY_HCA_VPORT_CONTEXT, 16);
        let answer = guest.ok(query, query_hca_vport_context_out::SIZE);
        let context = query_hca_vport_context_out::hca_vport_context.bytes(&answer);
        assert_eq!(port::has_smi.is_set(context), !vf);

        for (when, wanted) in [(1, 16), (2, 64)] {
            let mut query = input(opcode::QUERY_PAGES, 16);
            header::op_mod.set(&mut query, when);
            let answer = guest.ok(query, query_pages_out::SIZE);
            let wanted = if vf { 0 } else { wanted };
            assert_eq!(query_pages_out::num_pages.get(&answer), wanted);
        }

        let mut set = input(opcode::ACCESS_REG, access_register_in::SIZE + 16);
        access_register_in::register_id.set(&mut set, HOST_ENDIANNESS);
        let answer = guest.command(set, 32);
        assert_eq!(status(&answer), if vf { 0x02 } else { 0 });
    }
}

/// More objects than a physical function's pages of the start are enough for.
#[test]
pub fn a_virtual_function_never_asks_for_pages() {
    for vf in [false, true] {
        let mut guest = function(vf);
        let domains: Vec<u32> = (0..600).map(|_| guest.alloc(opcode::ALLOC_PD)).collect();
        let asked = std::iter::from_fn(|| guest.event()).any(|(kind, _)| kind == 0x0b);
        assert_eq!(asked, !vf, "MLX5_EVENT_TYPE_PAGE_REQUEST");
        if asked {
            let mut refuse = input(opcode::MANAGE_PAGES, manage_pages_in::SIZE);
            header::op_mod.set(&mut refuse, 0);
            guest.ok(refuse, 16);
        }
        for domain in domains {
            assert_eq!(guest.on_object(opcode::DEALLOC_PD, domain), 0);
        }
    }
}
