// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the tests inside the virtual machine share.
