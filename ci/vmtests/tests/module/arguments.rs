// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arguments of ioctls: sizes, flags, what is written back.

use crate::fixture::{Pair, alone};
use ibgda_uapi::*;
use ibgda_verbs_sys::uverbs::UarType;
use ibgda_vmtests::broker::{Mapping, Number, Session, ioctl};
use ibgda_vmtests::verbs::Verbs;
use std::os::fd::AsRawFd;

#[test]
fn info_tells_the_limits_and_only_features_that_work() {
    alone(|| {
        let session = Session::open();
        let info = session.info().expect("INFO needs no bind");
        assert_eq!(
            (info.abi_version, info.page_size),
            (IBGDA_ABI_VERSION, IBGDA_PAGE_SIZE)
        );
        assert_eq!(
            info.features & IBGDA_FEATURE_DOORBELL_UC,
            IBGDA_FEATURE_DOORBELL_UC
        );
        assert!(info.max_doorbells > 0 && info.max_queues > 0 && info.max_queue_bytes > 0);

        let pair = Pair::new();
        let session = pair.session();
        let verbs = Verbs::open(pair.nic);
        for (feature, mem_type, kind) in [
            (IBGDA_FEATURE_DOORBELL_UC, IBGDA_MEM_UC, UarType::NonCached),
            (IBGDA_FEATURE_DOORBELL_WC, IBGDA_MEM_WC, UarType::BlueFlame),
        ] {
            let uar = verbs.alloc_uar_of(kind).expect("allocate a UAR");
            let dmabuf = verbs.export(&uar);
            let works = session
                .import_as(&dmabuf, &verbs.uverbs(), mem_type)
                .map(|_| ());
            let expected = if info.features & feature != 0 {
                Ok(())
            } else {
                Err(libc::EOPNOTSUPP)
            };
            assert_eq!(works, expected, "doorbell of type {mem_type}");
        }
        for (feature, mem_type) in [
            (IBGDA_FEATURE_QUEUE_UC, IBGDA_MEM_UC),
            (IBGDA_FEATURE_QUEUE_WC, IBGDA_MEM_WC),
        ] {
            let works = session.alloc_queue(4096, -1, mem_type).map(|_| ());
            let expected = if info.features & feature != 0 {
                Ok(())
            } else {
                Err(libc::EOPNOTSUPP)
            };
            assert_eq!(works, expected, "queue memory of type {mem_type}");
        }
    });
}

/// N2: sizes, tails, unknown commands.
#[test]
fn an_argument_of_wrong_size_or_with_unknown_bits_is_refused() {
    alone(|| {
        let session = Session::open();
        let mut bytes = [0_u8; 8192];
        let mut info = |size: u32, poison: Option<usize>| {
            bytes.fill(0);
            bytes[..4].copy_from_slice(&size.to_ne_bytes());
            if let Some(at) = poison {
                bytes[at] = 1;
            }
            // SAFETY: no command reads or writes beyond 4096 bytes.
            let result = unsafe { ioctl(&session, IBGDA_IOC_INFO, bytes.as_mut_ptr()) };
            result.map(|()| bytes)
        };
        assert_eq!(info(0, None), Err(libc::EINVAL));
        assert_eq!(
            info(39, None),
            Err(libc::EINVAL),
            "shorter than the first version"
        );
        assert_eq!(info(40, Some(4)), Err(libc::EINVAL), "a flag nobody knows");
        assert_eq!(info(48, Some(47)), Err(libc::E2BIG), "a field nobody knows");
        assert_eq!(info(4096, Some(4095)), Err(libc::E2BIG));
        assert_eq!(info(4097, None), Err(libc::E2BIG));
        assert_eq!(info(u32::MAX, None), Err(libc::E2BIG));
        let answer = info(4096, None).expect("zeros beyond what is known");
        assert_eq!(answer[8..12], IBGDA_ABI_VERSION.to_ne_bytes());
        assert!(
            answer[40..].iter().all(|&byte| byte == 0),
            "nothing is written beyond the structure"
        );

        for command in [0, 0xbd0a, 0xbdff, IBGDA_IOC_INFO | 0xc028_0000, 0x5401] {
            // SAFETY: as above.
            let result = unsafe { ioctl(&session, command, bytes.as_mut_ptr()) };
            assert_eq!(result, Err(libc::ENOTTY), "command {command:#x}");
        }
        // SAFETY: the kernel checks the address.
        let result = unsafe { ioctl(&session, IBGDA_IOC_INFO, 8 as *mut u8) };
        assert_eq!(result, Err(libc::EFAULT));
    });
}

/// N12: the answer has nowhere to go.
#[test]
fn an_answer_that_cannot_be_written_leaves_nothing_behind() {
    alone(|| {
        let pair = Pair::new();
        let session = pair.session();
        // Read-only: the argument can be fetched, the answer not stored.
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let page = Mapping::new(
            &Number(-1),
            4096,
            libc::PROT_READ | libc::PROT_WRITE,
            anonymous,
            0,
        )
        .expect("a page");
        page.store(0, size_of::<ibgda_queue_alloc>() as u64);
        page.store(8, 4096);
        page.store(16, u64::from(u32::MAX));
        page.protect(libc::PROT_READ).expect("make it read-only");
        // SAFETY: a queue_alloc argument.
        let result = unsafe { ioctl(&session, IBGDA_IOC_QUEUE_ALLOC, page.address) };
        assert_eq!(result, Err(libc::EFAULT));
        assert!(
            session.fdinfo().contains("\nqueues:\t0\n"),
            "{}",
            session.fdinfo()
        );

        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        let (dmabuf, uverbs) = (dmabuf.as_raw_fd() as u64, verbs.uverbs().as_raw_fd() as u64);
        page.protect(libc::PROT_READ | libc::PROT_WRITE)
            .expect("make it writable");
        page.store(0, size_of::<ibgda_doorbell_import>() as u64);
        page.store(8, dmabuf | (uverbs << 32));
        page.store(16, u64::from(IBGDA_MEM_UC));
        page.protect(libc::PROT_READ).expect("make it read-only");
        // SAFETY: a doorbell_import argument.
        let result = unsafe { ioctl(&session, IBGDA_IOC_DOORBELL_IMPORT, page.address) };
        assert_eq!(result, Err(libc::EFAULT));
        assert!(
            session.fdinfo().contains("\ndoorbells:\t0\n"),
            "{}",
            session.fdinfo()
        );
    });
}

/// An argument as bytes, for what no structure can say.
struct Raw(Vec<u8>);

impl Raw {
    fn new(size: usize) -> Self {
        let mut bytes = vec![0; size];
        bytes[..4].copy_from_slice(&(size as u32).to_ne_bytes());
        Self(bytes)
    }

    fn put(mut self, at: usize, value: u32) -> Self {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        self
    }

    fn call(&mut self, session: &Session, command: u32) -> Result<(), i32> {
        // SAFETY: as long as it says.
        unsafe { ioctl(session, command, self.0.as_mut_ptr()) }
    }

    /// How the call ends when one byte more is set.
    fn with(&self, at: usize, session: &Session, command: u32) -> Result<(), i32> {
        let mut poisoned = Self(self.0.clone());
        poisoned.0[at] = 1;
        poisoned.call(session, command)
    }
}

fn bind_argument(pair: &Pair) -> Raw {
    let mut bind = Raw::new(size_of::<ibgda_bind>());
    for (at, bdf) in [(8, pair.gpu), (16, pair.nic)] {
        bind = bind.put(at, bdf.domain);
        bind.0[at + 4..at + 7].copy_from_slice(&[bdf.bus, bdf.device, bdf.function]);
    }
    bind
}

/// N2: each command's flags and reserved fields.
#[test]
fn flags_and_reserved_fields_of_every_command_must_be_zero() {
    alone(|| {
        let pair = Pair::new();
        let session = Session::open();
        let mut bind = bind_argument(&pair);
        for at in [4, 7, 15, 23, 132, 135] {
            let result = bind.with(at, &session, IBGDA_IOC_BIND);
            assert_eq!(result, Err(libc::EINVAL), "BIND, byte {at}");
        }
        bind.call(&session, IBGDA_IOC_BIND)
            .expect("BIND without them");

        let queue = Raw::new(size_of::<ibgda_queue_alloc>())
            .put(8, 4096)
            .put(16, u32::MAX);
        let events = Raw::new(size_of::<ibgda_events>());
        let status = Raw::new(size_of::<ibgda_status_map>());
        for (mut argument, command, places, otherwise) in [
            (queue, IBGDA_IOC_QUEUE_ALLOC, &[4, 7, 28, 31][..], Ok(())),
            (status, IBGDA_IOC_STATUS, &[4, 7], Ok(())),
            // One record, and there is none.
            (
                events.put(16, 1),
                IBGDA_IOC_EVENTS,
                &[4, 7],
                Err(libc::EAGAIN),
            ),
        ] {
            for &at in places {
                let result = argument.with(at, &session, command);
                assert_eq!(result, Err(libc::EINVAL), "{command:#x}, byte {at}");
            }
            assert_eq!(argument.call(&session, command), otherwise, "{command:#x}");
        }
        let verbs = Verbs::open(pair.nic);
        let dmabuf = verbs.export(&verbs.alloc_uar());
        let mut import = Raw::new(size_of::<ibgda_doorbell_import>())
            .put(8, dmabuf.as_raw_fd() as u32)
            .put(12, verbs.uverbs().as_raw_fd() as u32)
            .put(16, IBGDA_MEM_UC);
        for at in [4, 7] {
            let result = import.with(at, &session, IBGDA_IOC_DOORBELL_IMPORT);
            assert_eq!(result, Err(libc::EINVAL), "DOORBELL_IMPORT, byte {at}");
        }
        import
            .call(&session, IBGDA_IOC_DOORBELL_IMPORT)
            .expect("DOORBELL_IMPORT without them");
    });
}

/// N13: what is not documented to be written is not, and what is, wholly: nothing of the kernel's or of earlier callers'
/// is in between.
#[test]
fn an_answer_has_what_is_documented_and_no_other_bytes() {
    alone(|| {
        const POISON: u8 = 0xa5;
        let pair = Pair::new();
        let session = Session::open();
        let mut bind = bind_argument(&pair);
        bind.0[24..132].fill(POISON);
        bind.call(&session, IBGDA_IOC_BIND).expect("BIND");
        let name = &bind.0[24..88];
        let end = name.iter().position(|&byte| byte == 0).expect("a NUL");
        assert!(name[..end].starts_with(b"mlx5_"), "{name:?}");
        assert!(name[end..].iter().all(|&byte| byte == 0), "{name:?}");
        assert!(!bind.0[88..].contains(&POISON), "{:x?}", &bind.0[88..]);

        let mut queue = Raw::new(size_of::<ibgda_queue_alloc>())
            .put(8, 4096)
            .put(16, u32::MAX);
        queue.0[24..28].fill(POISON);
        queue.0[32..].fill(POISON);
        queue
            .call(&session, IBGDA_IOC_QUEUE_ALLOC)
            .expect("QUEUE_ALLOC");
        assert!(!queue.0[24..].contains(&POISON), "{:x?}", queue.0);

        // A record, in memory for two.
        let verbs = Verbs::open(pair.nic);
        let uar = verbs.alloc_uar();
        let dmabuf = verbs.export(&uar);
        session.import(&dmabuf, &verbs.uverbs()).expect("import");
        verbs.destroy(uar);
        let record = size_of::<ibgda_event>();
        let mut records = vec![POISON; 2 * record];
        let count = session.events_to(records.as_mut_ptr() as u64, 2);
        assert_eq!(count, Ok(1));
        let (first, second) = records.split_at(record);
        assert!(!first.contains(&POISON), "{first:x?}");
        assert!(second.iter().all(|&byte| byte == POISON), "{second:x?}");
    });
}
