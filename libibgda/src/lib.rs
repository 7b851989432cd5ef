// SPDX-License-Identifier: MIT OR Apache-2.0
//! GPU-initiated RDMA on an mlx5 NIC, by way of the IBGDA broker (`/dev/ibgda`).
