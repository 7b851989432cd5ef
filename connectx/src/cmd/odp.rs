// SPDX-License-Identifier: MIT OR Apache-2.0
//! On-demand paging: the driver's answers to page faults, and the key that stands for no memory.

use super::{PRM, Reject, Reply, Request, ok};
use crate::engine;
use crate::ifc::command::{page_fault_resume_in, query_special_contexts_out};
use crate::ifc::opcode::Status;
use crate::objects::device::Device;
use crate::objects::memory::NULL_MKEY;

/// The driver has dealt with a page fault.
pub(super) fn resume(device: &mut Device, request: &Request<'_>) -> Result<Reply, Reject> {
    let input = request.input;
    let high = page_fault_resume_in::fault_token_47_32.get(input);
    let token = (high << 32) | page_fault_resume_in::fault_token_31_0.get(input);
    let error = page_fault_resume_in::error.is_set(input);
    if !engine::odp::resume(device, token, error) {
        let rule = "the token is of a page fault that has been reported and not answered";
        let field = "fault_token";
        return Err(Reject::new(Status::BadResource, field, token, rule, PRM));
    }
    Ok(ok(16))
}

pub(super) fn query_special_contexts(_: &mut Device, _: &Request<'_>) -> Result<Reply, Reject> {
    let mut out = ok(query_special_contexts_out::SIZE);
    query_special_contexts_out::null_mkey.set(&mut out, u64::from(NULL_MKEY));
    Ok(out)
}
