/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/* ibgda_put of an exclusive QP in GPU memory, called once, for the listing of its instructions (kernels/tests/sass). */
#include <ibgda_device.cuh>

extern "C" __global__ void put(ibgda_qp *qp, ibgda_u64 remote, ibgda_u32 rkey, ibgda_u64 local, ibgda_u32 lkey, ibgda_u32 bytes,
			       ibgda_status *status)
{
	*status = ibgda_put<IBGDA_ON_GPU>(qp, remote, rkey, local, lkey, bytes);
}
