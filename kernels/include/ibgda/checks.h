/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * What is checked of a request before it is posted. Always: what would make the NIC do something else than what was asked.
 * With IBGDA_CHECKS defined as IBGDA_CHECKS_FULL, everything that can be known here, and the error names the argument;
 * without it the NIC finds it, and says so in a completion.
 */
#ifndef IBGDA_CHECKS_H
#define IBGDA_CHECKS_H

#include "ibgda/wqe.h"

#define IBGDA_CHECKS_USUAL 1
#define IBGDA_CHECKS_FULL 2
#ifndef IBGDA_CHECKS
#define IBGDA_CHECKS IBGDA_CHECKS_USUAL
#endif

#define IBGDA_ALL_FLAGS 0x3fu
/* Keys that no region has: the invalid one of the PRM, and all ones. */
IBGDA_PURE bool ibgda_no_key(ibgda_u32 key) { return key == IBGDA_INVALID_LKEY || key == ~0u; }

/* May the kernel use this handle in the way that M says? */
template <ibgda_u32 M> IBGDA_FN ibgda_status ibgda_check_handle(const ibgda_qp *qp, ibgda_u32 flags)
{
	if (IBGDA_CHECKS < IBGDA_CHECKS_FULL)
		return IBGDA_OK;
	/* A shared handle may be used by one thread alone, and BlueFlame need not be used. */
	const ibgda_u32 may_lack = IBGDA_SHARED | IBGDA_BLUEFLAME;
	if ((M & IBGDA_SCOPES) == IBGDA_SCOPES || ((M & ~IBGDA_SCOPES) & ~qp->mode) || (qp->mode & ~M & ~may_lack))
		return IBGDA_ERR_MODE;
	if ((flags & ~IBGDA_ALL_FLAGS) || ((flags & IBGDA_SKIP) && !(M & IBGDA_SCOPES)))
		return IBGDA_ERR_FLAGS;
	return IBGDA_OK;
}

/* The remote side of a request. `align`: a power of two. */
IBGDA_FN ibgda_status ibgda_check_remote(ibgda_u64 remote, ibgda_u32 rkey, ibgda_u32 bytes, ibgda_u32 align)
{
	if (IBGDA_CHECKS < IBGDA_CHECKS_FULL)
		return remote & (align - 1) ? IBGDA_ERR_INVALID_ARGUMENT : IBGDA_OK;
	if ((remote & (align - 1)) || remote + bytes < remote)
		return IBGDA_ERR_REMOTE;
	return bytes && ibgda_no_key(rkey) ? IBGDA_ERR_RKEY : IBGDA_OK;
}

/* The local side, and the length. */
IBGDA_FN ibgda_status ibgda_check_local(ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes)
{
	if (IBGDA_CHECKS < IBGDA_CHECKS_FULL)
		return bytes > IBGDA_MAX_MESSAGE_BYTES ? IBGDA_ERR_INVALID_ARGUMENT : IBGDA_OK;
	if (bytes > IBGDA_MAX_MESSAGE_BYTES)
		return IBGDA_ERR_BYTES;
	if (local + bytes < local)
		return IBGDA_ERR_LOCAL;
	return bytes && ibgda_no_key(lkey) ? IBGDA_ERR_LKEY : IBGDA_OK;
}

IBGDA_FN ibgda_status ibgda_check_inline(ibgda_u32 bytes)
{
	if (bytes && bytes <= IBGDA_MAX_INLINE_BYTES)
		return IBGDA_OK;
	return IBGDA_CHECKS < IBGDA_CHECKS_FULL ? IBGDA_ERR_INVALID_ARGUMENT : IBGDA_ERR_BYTES;
}

/* Are `bytes` at `offset` inside the region? */
IBGDA_PURE bool ibgda_inside(const ibgda_region &region, ibgda_u64 offset, ibgda_u64 bytes)
{
	return offset <= region.length && bytes <= region.length - offset;
}

#endif
