// SPDX-License-Identifier: MIT OR Apache-2.0
//! Explains dumps of the device's structures: every field by name, with what its value means and what is wrong with it.
//!
//! Layouts and rules are those that the model itself works with, so that a reader of a dump and the referee agree.

pub mod hex;
mod names;
mod rules;
mod wqe;

use std::fmt::{self, Write as _};

use serde::Serialize;

use crate::ifc::{Field, context, event, wqe as layout};
use crate::objects::qp::Service;

/// Service of the queue pair that a WQE belongs to, as command lines name it.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
#[allow(missing_docs)] // The names are the words themselves.
pub enum ServiceName {
    Rc,
    Uc,
    Ud,
    Xrc,
    Umr,
}

impl From<ServiceName> for Service {
    fn from(name: ServiceName) -> Self {
        match name {
            ServiceName::Rc => Self::Rc,
            ServiceName::Uc => Self::Uc,
            ServiceName::Ud => Self::Ud,
            ServiceName::Xrc => Self::Xrc,
            ServiceName::Umr => Self::RegUmr,
        }
    }
}

/// A structure that can be explained.
struct Kind {
    name: &'static str,
    what: &'static str,
    size: usize,
    fields: &'static [(&'static str, Field)],
}

macro_rules! kinds {
    ($( $what:literal $module:ident::$name:ident, )*) => {
        &[ $( Kind {
            name: stringify!($name),
            what: $what,
            size: $module::$name::SIZE,
            fields: $module::$name::FIELDS,
        }, )* ]
    };
}

/// Every structure of a fixed layout. A WQE is not one: its opcode says which segments follow.
const KINDS: &[Kind] = kinds![
    "completion queue entry" layout::cqe,
    "event queue entry" event::eqe,
    "queue pair context" context::qpc,
    "address path" context::ads,
    "completion queue context" context::cqc,
    "event queue context" context::eqc,
    "memory key context" context::mkc,
    "shared receive queue context" context::srqc,
    "XRC shared receive queue context" context::xrc_srqc,
    "work queue of a receive memory pool" context::wq,
    "memory translation table entry" context::mtt,
    "port as a function sees it" context::hca_vport_context,
];

/// A field of a dump.
#[derive(Debug, Serialize)]
pub struct Row {
    /// Structure or segment that the field belongs to.
    pub part: &'static str,
    /// Offset of its first byte in the dump.
    pub offset: usize,
    /// Bits in that byte and after: the first one (0 the most significant) and how many.
    pub bits: (u8, u16),
    /// Name of the field.
    pub field: &'static str,
    /// Value, in hexadecimal digits.
    pub value: String,
    /// What the value means, where it has a name.
    pub meaning: Option<&'static str>,
}

/// A dump taken apart.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// Every field.
    pub fields: Vec<Row>,
    /// What is wrong, as sentences that name the field.
    pub problems: Vec<String>,
}

/// The structures that [`explain`] knows, each with what it is.
pub fn kinds() -> impl Iterator<Item = (&'static str, &'static str)> {
    let wqe = [
        ("wqe", "send work queue entry"),
        ("rwqe", "receive work queue entry"),
    ];
    wqe.into_iter()
        .chain(KINDS.iter().map(|kind| (kind.name, kind.what)))
}

/// Takes a dump apart. The service matters to a WQE only: its segments depend on it.
pub fn explain(kind: &str, service: Service, bytes: &[u8]) -> Result<Explanation, String> {
    match kind {
        "wqe" => Ok(wqe::send(service, bytes)),
        "rwqe" => Ok(wqe::receive(bytes)),
        _ => {
            let known = KINDS.iter().find(|known| known.name == kind);
            known.map(|known| known.explain(bytes)).ok_or_else(|| {
                let all: Vec<&str> = kinds().map(|(name, _)| name).collect();
                format!("no structure {kind:?}; there are {}", all.join(", "))
            })
        }
    }
}

impl Kind {
    fn explain(&self, bytes: &[u8]) -> Explanation {
        let mut e = Explanation {
            fields: Vec::new(),
            problems: Vec::new(),
        };
        let given = &bytes[..bytes.len().min(self.size)];
        e.part(self.name, self.fields, given, 0);
        if bytes.len() != self.size {
            e.problems.push(format!(
                "{} bytes given, a {} has {}",
                bytes.len(),
                self.name,
                self.size
            ));
        }
        e.problems.extend(rules::check(self.name, given));
        e
    }
}

impl Explanation {
    /// Adds the fields of a structure that lies at `offset` of the dump, as far as there are bytes, and names bits
    /// that belong to none of them.
    fn part(
        &mut self,
        part: &'static str,
        fields: &[(&'static str, Field)],
        bytes: &[u8],
        offset: usize,
    ) {
        let mut unnamed = bytes.to_vec();
        for &(field, place) in fields
            .iter()
            .filter(|(_, place)| place.offset() < bytes.len())
        {
            let value = if place.width() <= 64 {
                format!("{:#x}", place.get(bytes))
            } else {
                place
                    .bytes(bytes)
                    .iter()
                    .fold(String::from("0x"), |mut text, byte| {
                        let _ = write!(text, "{byte:02x}");
                        text
                    })
            };
            let meaning = (place.width() <= 64)
                .then(|| names::meaning(part, field, place.get(bytes)))
                .flatten();
            self.fields.push(Row {
                part,
                offset: offset + place.offset(),
                bits: (place.bit(), place.width()),
                field,
                value,
                meaning,
            });
            for bit in
                usize::from(place.bit())..usize::from(place.bit()) + usize::from(place.width())
            {
                if let Some(byte) = unnamed.get_mut(place.offset() + bit / 8) {
                    *byte &= !(0x80 >> (bit % 8));
                }
            }
        }
        let rest = unnamed.iter().enumerate().filter(|(_, byte)| **byte != 0);
        let rest: Vec<String> = rest
            .map(|(at, byte)| format!("{:#x}: {byte:#04x}", offset + at))
            .collect();
        if !rest.is_empty() {
            self.problems.push(format!(
                "{part}: bits outside every field known to the model are set, at byte {}",
                rest.join(", ")
            ));
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .fields
            .iter()
            .map(|row| row.field.len())
            .max()
            .unwrap_or(0);
        let mut part = "";
        for row in &self.fields {
            if row.part != part {
                part = row.part;
                writeln!(f, "{part}")?;
            }
            let (bit, bits) = row.bits;
            write!(
                f,
                "  {:#05x}.{bit}:{bits:<4} {:width$}  {}",
                row.offset, row.field, row.value
            )?;
            match row.meaning {
                Some(meaning) => writeln!(f, "  {meaning}")?,
                None => writeln!(f)?,
            }
        }
        match self.problems.as_slice() {
            [] => writeln!(f, "nothing is wrong with it by itself"),
            problems => problems
                .iter()
                .try_for_each(|problem| writeln!(f, "wrong: {problem}")),
        }
    }
}

#[cfg(test)]
mod tests;
