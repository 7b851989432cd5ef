// SPDX-License-Identifier: MIT OR Apache-2.0
//! Names of PCI functions.

use ibgda_uapi::ibgda_bdf;
use std::{fmt, str::FromStr};

/// A PCI function, as in `0000:03:00.0`; the domain may be left out when parsing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bdf {
    /// PCI domain.
    pub domain: u32,
    /// Bus number.
    pub bus: u8,
    /// Device number, 0 to 31.
    pub device: u8,
    /// Function number, 0 to 7.
    pub function: u8,
}

impl From<Bdf> for ibgda_bdf {
    fn from(bdf: Bdf) -> Self {
        Self {
            domain: bdf.domain,
            bus: bdf.bus,
            device: bdf.device,
            function: bdf.function,
            reserved: 0,
        }
    }
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:04x}:{:02x}:{:02x}.{:x}",
            self.domain, self.bus, self.device, self.function
        )
    }
}

/// A text that names no PCI function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseBdfError(String);

impl fmt::Display for ParseBdfError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} is not a PCI function such as \"0000:03:00.0\"",
            self.0
        )
    }
}

impl std::error::Error for ParseBdfError {}

impl FromStr for Bdf {
    type Err = ParseBdfError;

    fn from_str(text: &str) -> Result<Self, ParseBdfError> {
        let parse = || {
            let hex = |digits: &str, longest: usize| {
                let well_formed = (1..=longest).contains(&digits.len())
                    && digits.bytes().all(|b| b.is_ascii_hexdigit());
                well_formed
                    .then(|| u32::from_str_radix(digits, 16).ok())
                    .flatten()
            };
            let (place, function) = text.split_once('.')?;
            let mut parts = place.rsplit(':');
            let (device, bus) = (hex(parts.next()?, 2)?, hex(parts.next()?, 2)?);
            let domain = parts.next().map_or(Some(0), |domain| hex(domain, 8))?;
            let function = hex(function, 1)?;
            if parts.next().is_some() || device > 31 || function > 7 {
                return None;
            }
            Some(Self {
                domain,
                bus: bus as u8,
                device: device as u8,
                function: function as u8,
            })
        };
        parse().ok_or_else(|| ParseBdfError(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_lspci_prints() {
        let bdf = Bdf {
            domain: 0,
            bus: 0x65,
            device: 0x1f,
            function: 7,
        };
        assert_eq!("0000:65:1f.7".parse(), Ok(bdf));
        assert_eq!("65:1f.7".parse(), Ok(bdf));
        assert_eq!(
            "10000:65:1f.7".parse(),
            Ok(Bdf {
                domain: 0x10000,
                ..bdf
            })
        );
        assert_eq!(bdf.to_string(), "0000:65:1f.7");
    }

    #[test]
    fn refuses_everything_else() {
        for text in [
            "",
            "mlx5_0",
            "0000:65:20.0",
            "0000:65:00.8",
            "65:00",
            "0:0:65:00.0",
            "+1:00.0",
            "165:00.0",
            "0000:65:00.0 ",
        ] {
            assert!(text.parse::<Bdf>().is_err(), "{text:?} was taken");
        }
    }
}
