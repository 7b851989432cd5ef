// SPDX-License-Identifier: MIT OR Apache-2.0
//! Calls of the uverbs ioctl interface (`rdma/rdma_user_ioctl_cmds.h`) that rdma-core 56 has no function for.

use std::{
    io,
    mem::size_of,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
};

/// `_IOWR(RDMA_IOCTL_MAGIC, 1, struct ib_uverbs_ioctl_hdr)`.
const RDMA_VERBS_IOCTL: u32 = (3 << 30) | ((size_of::<Header>() as u32) << 16) | (0x1b << 8) | 1;

/// `RDMA_DRIVER_MLX5`.
const DRIVER_MLX5: u32 = 1;
/// `UVERBS_ATTR_F_MANDATORY`.
const MANDATORY: u16 = 1;
/// `1 << UVERBS_ID_NS_SHIFT`: where a driver's own ids begin.
const DRIVER_NAMESPACE: u16 = 1 << 12;

/// `struct ib_uverbs_ioctl_hdr`.
#[repr(C)]
struct Header {
    length: u16,
    object_id: u16,
    method_id: u16,
    num_attrs: u16,
    reserved1: u64,
    driver_id: u32,
    reserved2: u32,
}

/// `struct ib_uverbs_attr`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Attribute {
    id: u16,
    len: u16,
    flags: u16,
    reserved: u16,
    data: u64,
}

#[repr(C)]
struct Request<const N: usize> {
    header: Header,
    attributes: [Attribute; N],
}

fn call<const N: usize>(
    uverbs: BorrowedFd<'_>,
    object_id: u16,
    method_id: u16,
    attributes: [Attribute; N],
) -> io::Result<[Attribute; N]> {
    let mut request = Request {
        header: Header {
            length: size_of::<Request<N>>() as u16,
            object_id,
            method_id,
            num_attrs: N as u16,
            reserved1: 0,
            driver_id: DRIVER_MLX5,
            reserved2: 0,
        },
        attributes,
    };
    // SAFETY: the request is a complete header with the attributes its length and count announce, all of them inline.
    let answer = unsafe {
        libc::ioctl(
            uverbs.as_raw_fd(),
            RDMA_VERBS_IOCTL as libc::Ioctl,
            &mut request,
        )
    };
    if answer < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(request.attributes)
    }
}

/// Exports one UAR page as a dma-buf (`UVERBS_METHOD_DMABUF_ALLOC`, Linux 7.1 and later; rdma-core has
/// `mlx5dv_devx_uar_export_dmabuf_fd` from MLX5_1.26 on).
///
/// `uverbs` is the device's command file (`ibv_context::cmd_fd`), `mmap_offset` the UAR's `mlx5dv_devx_uar::mmap_off` in
/// bytes. The dma-buf is 4096 bytes long and close-on-exec.
///
/// # Errors
/// `EINVAL`: no such mapping in this file; `EOPNOTSUPP`, `EPROTONOSUPPORT`: a kernel without this method, or without
/// peer-to-peer support for the device.
pub fn export_dmabuf(uverbs: BorrowedFd<'_>, mmap_offset: u64) -> io::Result<OwnedFd> {
    /// `UVERBS_OBJECT_DMABUF`; a constant because the headers of older kernels do not have it.
    const OBJECT_DMABUF: u16 = 18;
    const METHOD_ALLOC: u16 = 0;
    const ATTR_HANDLE: u16 = 0;
    const ATTR_PGOFF: u16 = 1;

    let attributes = [
        Attribute {
            id: ATTR_HANDLE,
            len: 0,
            flags: MANDATORY,
            reserved: 0,
            data: 0,
        },
        Attribute {
            id: ATTR_PGOFF,
            len: 8,
            flags: MANDATORY,
            reserved: 0,
            data: mmap_offset,
        },
    ];
    let [handle, _] = call(uverbs, OBJECT_DMABUF, METHOD_ALLOC, attributes)?;
    // SAFETY: the kernel has installed this descriptor for us and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(handle.data as i32) })
}

/// A UAR allocated past libmlx5, which keeps freed UARs for the next allocation: this one is destroyed when told so.
#[derive(Debug)]
pub struct Uar {
    /// The object's handle in its uverbs file.
    pub handle: u32,
    /// The firmware's index of the page; it lies at `page_id * 4096` in BAR0.
    pub page_id: u32,
    /// Where to mmap(2) the page in the uverbs file, and what [`export_dmabuf`] takes.
    pub mmap_offset: u64,
    /// Bytes there, 4096.
    pub mmap_length: u32,
}

/// `MLX5_IB_OBJECT_UAR`.
const OBJECT_UAR: u16 = DRIVER_NAMESPACE + 8;

/// What a UAR is mapped as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum UarType {
    /// Write-combining, for WQEs in its send registers (`MLX5_IB_UAPI_UAR_ALLOC_TYPE_BF`).
    BlueFlame = 0,
    /// Non-cached, for doorbells (`MLX5_IB_UAPI_UAR_ALLOC_TYPE_NC`).
    NonCached = 1,
}

/// Allocates a UAR (`MLX5_IB_METHOD_UAR_OBJ_ALLOC`).
///
/// # Errors
/// `EOPNOTSUPP`: the device context has no dynamic UARs, or (of BlueFlame) the device none, or the platform does not combine
/// writes; `ENOMEM`, `EREMOTEIO`: firmware has none left.
pub fn alloc_uar(uverbs: BorrowedFd<'_>, kind: UarType) -> io::Result<Uar> {
    let (mut mmap_offset, mut mmap_length, mut page_id) = (0_u64, 0_u32, 0_u32);
    let attribute = |index, len: usize, data| Attribute {
        id: DRIVER_NAMESPACE + index,
        len: len as u16,
        flags: MANDATORY,
        reserved: 0,
        data,
    };
    let [object, ..] = call(
        uverbs,
        OBJECT_UAR,
        DRIVER_NAMESPACE,
        [
            attribute(0, 0, 0),
            attribute(1, size_of::<u64>(), kind as u64),
            attribute(2, size_of::<u64>(), &raw mut mmap_offset as u64),
            attribute(3, size_of::<u32>(), &raw mut mmap_length as u64),
            attribute(4, size_of::<u32>(), &raw mut page_id as u64),
        ],
    )?;
    Ok(Uar {
        handle: object.data as u32,
        page_id,
        mmap_offset,
        mmap_length,
    })
}

/// Destroys a UAR object in the kernel (`MLX5_IB_METHOD_UAR_OBJ_DESTROY`), which revokes its dma-bufs.
///
/// # Errors
/// `ENOENT`: no such object in this file; `EBUSY`: something still uses it.
pub fn destroy_uar(uverbs: BorrowedFd<'_>, handle: u32) -> io::Result<()> {
    let attribute = Attribute {
        id: DRIVER_NAMESPACE,
        len: 0,
        flags: MANDATORY,
        reserved: 0,
        data: handle.into(),
    };
    call(uverbs, OBJECT_UAR, DRIVER_NAMESPACE + 1, [attribute]).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs::File, os::fd::AsFd};

    #[test]
    fn layouts_are_those_of_the_kernel_header() {
        assert_eq!(size_of::<Header>(), 24);
        assert_eq!(size_of::<Attribute>(), 16);
        assert_eq!(RDMA_VERBS_IOCTL, 0xc018_1b01);
    }

    #[test]
    fn a_file_that_is_not_uverbs_is_an_error() {
        let null = File::open("/dev/null").expect("open /dev/null");
        let error = export_dmabuf(null.as_fd(), 0).expect_err("/dev/null has no UARs");
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
