// SPDX-License-Identifier: MIT OR Apache-2.0
//! Heaps on the loopback route, by the Rust calls and by the C calls.

use ibgda::{Access, Context, HEAP_GRANULE, Heap, OpenOptions, Route, abi::ibgda_region, capi};
use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    ptr::null_mut,
    sync::Mutex,
    thread,
};

static NICS: Mutex<()> = Mutex::new(());

fn open(nic: &str) -> Context {
    Context::open(&OpenOptions {
        route: Route::Loopback,
        ..OpenOptions::new(nic, "0000:00:00.0".parse().expect("an address"))
    })
    .expect("opens")
}

#[test]
fn buffers_do_not_overlap_whichever_threads_take_and_give_them() {
    let _alone = NICS.lock();
    let context = open("loopback0");
    let heap = Heap::new(context.alloc(1 << 20, Access::all()).expect("memory"));
    let taken: Mutex<BTreeMap<u64, u64>> = Mutex::default();
    let whole = heap.region().region();
    thread::scope(|scope| {
        for me in 0..4_u64 {
            let (heap, taken) = (&heap, &taken);
            scope.spawn(move || {
                let mut mine = Vec::new();
                for round in 0..2_000_u64 {
                    let length = 1 + (round * 7919 + me * 104_729) % 5_000;
                    let align = 1 << (round % 13);
                    if let Ok(buffer) = heap.alloc(length, align) {
                        let region = buffer.region();
                        assert_eq!((region.length, region.address % align), (length, 0));
                        assert_eq!((region.lkey, region.rkey), (whole.lkey, whole.rkey));
                        let end = region.address + length;
                        assert!(region.address >= whole.address);
                        assert!(end <= whole.address + whole.length);
                        let mut taken = taken.lock().expect("no panic");
                        let before = taken.range(..end).next_back();
                        assert!(before.is_none_or(|(_, &to)| to <= region.address));
                        taken.insert(region.address, end);
                        mine.push(buffer);
                    }
                    if round % 3 == 2 || mine.len() > 40 {
                        let buffer = mine.swap_remove(round as usize % mine.len());
                        taken
                            .lock()
                            .expect("no panic")
                            .remove(&buffer.region().address);
                        drop(buffer);
                    }
                }
                taken.lock().expect("no panic").retain(|address, _| {
                    !mine
                        .iter()
                        .any(|buffer| buffer.region().address == *address)
                });
                drop(mine);
            });
        }
    });
    let usage = heap.usage();
    assert_eq!((usage.buffers, usage.used), (0, 0), "all came back");
    assert_eq!(usage.longest_free, 1 << 20, "in one piece");
}

#[test]
fn a_heap_says_what_it_has_no_room_for_and_outlives_its_handles() {
    let _alone = NICS.lock();
    let context = open("loopback0");
    let heap = Heap::new(context.alloc(8192, Access::all()).expect("memory"));
    let (one, _two) = (
        heap.alloc(4096, 4096).expect("room"),
        heap.alloc(100, 1).expect("room"),
    );
    let error = heap.alloc(4096, 64).expect_err("no room");
    assert_eq!(error.errno(), libc::ENOMEM);
    let text = error.to_string();
    assert!(
        text.contains("4224 of its 8192") && text.contains("3968"),
        "{text}"
    );
    for (length, align) in [(0, 64), (64, 0), (64, 48), (u64::MAX, 64)] {
        let error = heap.alloc(length, align).expect_err("cannot be");
        assert!(
            [libc::EINVAL, libc::ENOMEM].contains(&error.errno()),
            "{error}"
        );
    }
    drop((heap, context));
    one.write(4090, b"inside").expect("inside");
    assert!(one.write(4091, b"beyond").is_err());
    let mut back = [0; 6];
    one.read(4090, &mut back).expect("inside");
    assert_eq!(&back, b"inside");
    assert_eq!(one.heap().usage().buffers, 2);
    assert_eq!(HEAP_GRANULE, 64);
}

#[test]
fn c_programs_take_and_give_buffers_and_mistakes_are_refused() {
    fn check(errno: i32) {
        // SAFETY: the message is this thread's and terminated.
        let message = unsafe { CStr::from_ptr(capi::ibgda_last_error()) };
        assert_eq!(errno, 0, "{message:?}");
    }
    let _alone = NICS.lock();
    let nic = CString::new("loopback1").expect("no NUL");
    let attr = capi::ibgda_open_attr {
        size: size_of::<capi::ibgda_open_attr>() as u32,
        port: 1,
        nic: nic.as_ptr(),
        gpu: c"0000:00:00.0".as_ptr(),
        route: capi::IBGDA_ROUTE_LOOPBACK,
        reserved: 0,
    };
    let (mut context, mut heap, mut other) = (null_mut(), null_mut(), null_mut());
    let [mut whole, mut one, mut two] = [ibgda_region::default(); 3];
    #[repr(align(4096))]
    struct Pages([u8; 8192]);
    let mut own = Box::new(Pages([0; 8192]));
    // SAFETY: the arguments are valid; each object is destroyed once; the memory outlives its heap.
    unsafe {
        check(capi::ibgda_open(&attr, &mut context));
        let access = capi::IBGDA_ACCESS_WRITE;
        check(capi::ibgda_create_heap(
            context,
            null_mut(),
            8192,
            access,
            &mut heap,
        ));
        let memory = own.0.as_mut_ptr().cast();
        check(capi::ibgda_create_heap(
            context, memory, 8192, access, &mut other,
        ));
        check(capi::ibgda_close(context));
        check(capi::ibgda_heap_region(other, &mut whole));
        assert_eq!(whole.address, own.0.as_ptr() as u64);

        check(capi::ibgda_heap_alloc(heap, 100, 256, &mut one));
        check(capi::ibgda_heap_alloc(other, 100, 64, &mut two));
        assert_eq!((one.address % 256, one.length), (0, 100));
        assert_eq!(capi::ibgda_heap_free(heap, &two), libc::EINVAL, "another's");
        assert_eq!(capi::ibgda_destroy_heap(heap), libc::EBUSY);
        let inside = ibgda_region {
            address: one.address + 64,
            ..one
        };
        assert_eq!(capi::ibgda_heap_free(heap, &inside), libc::EINVAL);
        check(capi::ibgda_heap_free(heap, &one));
        assert_eq!(capi::ibgda_heap_free(heap, &one), libc::EINVAL, "twice");
        let message = CStr::from_ptr(capi::ibgda_last_error()).to_string_lossy();
        assert!(message.contains("given back before"), "{message}");
        assert_eq!(
            capi::ibgda_heap_alloc(heap, 8193, 64, &mut one),
            libc::ENOMEM
        );
        check(capi::ibgda_heap_free(other, &two));
        check(capi::ibgda_destroy_heap(heap));
        check(capi::ibgda_destroy_heap(other));
    }
}
