// SPDX-License-Identifier: (GPL-2.0 WITH Linux-syscall-note) OR MIT
//! The ioctl ABI of `/dev/ibgda`: the structures and constants of `ibgda.h`, under the names they have there. That header
//! documents them.
#![no_std]

#[allow(
    missing_docs,
    non_camel_case_types,
    clippy::undocumented_unsafe_blocks,
    rustdoc::all
)]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/uapi.rs"));
}
pub use generated::*;

// The sizes of ABI version 1. They are part of the ABI (a caller passes them), and the same for 32-bit callers.
const _: () = {
    assert!(size_of::<ibgda_info>() == 40);
    assert!(size_of::<ibgda_bdf>() == 8);
    assert!(size_of::<ibgda_link>() == 12);
    assert!(size_of::<ibgda_bind>() == 136);
    assert!(size_of::<ibgda_doorbell_import>() == 40);
    assert!(size_of::<ibgda_queue_alloc>() == 40);
    assert!(size_of::<ibgda_populate>() == 16);
    assert!(size_of::<ibgda_status_map>() == 16);
    assert!(size_of::<ibgda_release>() == 8);
    assert!(size_of::<ibgda_eventfd>() == 8);
    assert!(size_of::<ibgda_event>() == 24);
    assert!(size_of::<ibgda_events>() == 24);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_carry_type_and_number_and_no_size() {
        assert_eq!(IBGDA_IOC_INFO, 0xbd00);
        assert_eq!(IBGDA_IOC_REBIND, 0xbd09);
    }
}
