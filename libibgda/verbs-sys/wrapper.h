/* SPDX-License-Identifier: MIT OR Apache-2.0 */
#include <infiniband/verbs.h>
#include <infiniband/mlx5dv.h>
