// SPDX-License-Identifier: GPL-2.0
//! Names of PCI functions, and of the pairs that the policy allows.

use core::fmt;

/// A PCI function. Invariant: `device` < 32, `function` < 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bdf {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl Bdf {
    /// `None` when the device or function number is out of range.
    pub const fn new(domain: u32, bus: u8, device: u8, function: u8) -> Option<Self> {
        if device < 32 && function < 8 {
            Some(Self {
                domain,
                bus,
                device,
                function,
            })
        } else {
            None
        }
    }

    /// The function whose kernel numbers are these.
    pub const fn from_devfn(domain: u32, bus: u8, devfn: u8) -> Self {
        Self {
            domain,
            bus,
            device: devfn >> 3,
            function: devfn & 7,
        }
    }

    /// The PCI domain (segment).
    pub const fn domain(&self) -> u32 {
        self.domain
    }

    /// The bus.
    pub const fn bus(&self) -> u8 {
        self.bus
    }

    /// Device and function as the kernel packs them.
    pub const fn devfn(&self) -> u8 {
        (self.device << 3) | self.function
    }

    /// Reads the one way of writing a function that [`fmt::Display`] has: `0000:03:00.0`, lower case, a domain of four to
    /// eight digits without superfluous zeros.
    pub fn parse(text: &[u8]) -> Option<Self> {
        // From the right: ".f", ":dd", ":bb", and what is left is the domain.
        let (rest, function) = text.split_last_chunk::<2>()?;
        let (rest, device) = rest.split_last_chunk::<3>()?;
        let (domain, bus) = rest.split_last_chunk::<3>()?;
        if function[0] != b'.' || device[0] != b':' || bus[0] != b':' {
            return None;
        }
        let canonical = domain.len() == 4 || ((5..=8).contains(&domain.len()) && domain[0] != b'0');
        if !canonical {
            return None;
        }
        Self::new(
            hex(domain)?,
            hex(&bus[1..])? as u8,
            hex(&device[1..])? as u8,
            hex(&function[1..])? as u8,
        )
    }
}

/// Up to eight lower-case hexadecimal digits.
fn hex(digits: &[u8]) -> Option<u32> {
    digits.iter().try_fold(0, |value: u32, digit| {
        let digit = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some((value << 4) | u32::from(digit))
    })
}

impl fmt::Display for Bdf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            domain,
            bus,
            device,
            function,
        } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

/// A pair that the policy allows: `<gpu>@<nic>`, each a function or `*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// `None` is any.
    gpu: Option<Bdf>,
    nic: Option<Bdf>,
}

impl Pair {
    /// Reads `<gpu>@<nic>`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let at = text.iter().position(|&byte| byte == b'@')?;
        let side = |text: &[u8]| match text {
            b"*" => Some(None),
            text => Bdf::parse(text).map(Some),
        };
        let (gpu, nic) = (side(&text[..at])?, side(&text[at + 1..])?);
        // One function is not both; whoever writes this meant something else.
        if gpu.is_some() && gpu == nic {
            return None;
        }
        Some(Self { gpu, nic })
    }

    /// Whether the entry speaks of these two.
    pub fn covers(&self, gpu: Bdf, nic: Bdf) -> bool {
        self.gpu.is_none_or(|name| name == gpu) && self.nic.is_none_or(|name| name == nic)
    }
}

/// A link's speed in MT/s from the code in the PCI Express Link Status or Link Capabilities register; 0 for a code that
/// is not assigned.
pub const fn link_speed(code: u32) -> u32 {
    match code & 0xf {
        1 => 2_500,
        2 => 5_000,
        3 => 8_000,
        4 => 16_000,
        5 => 32_000,
        6 => 64_000,
        _ => 0,
    }
}

/// A link's width in lanes, from the same registers.
pub const fn link_width(register: u32) -> u16 {
    ((register >> 4) & 0x3f) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn what_is_written_is_what_is_read() {
        for text in [
            "0000:00:00.0",
            "0000:03:1f.7",
            "10000:e1:00.1",
            "ffffffff:ff:1f.7",
        ] {
            assert_eq!(Bdf::parse(text.as_bytes()).unwrap().to_string(), text);
        }
    }

    #[test]
    fn no_second_spelling_of_a_function() {
        for text in [
            "",
            "03:00.0",
            "000:03:00.0",
            "00000:03:00.0",
            "0000:3:00.0",
            "0000:03:0.0",
            "0000:03:00",
            "0000:03:00.8",
            "0000:03:20.0",
            "0000:0A:00.0",
            " 0000:03:00.0",
            "0000:03:00.0\n",
            "0000-03:00.0",
            "123456789:03:00.0",
            "0000:03:00.00",
            "+000:03:00.0",
        ] {
            assert_eq!(Bdf::parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_no_function() {
        assert!(Bdf::new(0, 0, 32, 0).is_none());
        assert!(Bdf::new(0, 0, 0, 8).is_none());
        assert_eq!(Bdf::from_devfn(1, 2, 0xff), Bdf::new(1, 2, 31, 7).unwrap());
        assert_eq!(Bdf::new(1, 2, 31, 7).unwrap().devfn(), 0xff);
    }

    #[test]
    fn a_wildcard_stands_for_one_side() {
        let gpu = Bdf::parse(b"0000:04:00.0").unwrap();
        let nic = Bdf::parse(b"0000:03:00.0").unwrap();
        let covers = |text: &str| Pair::parse(text.as_bytes()).unwrap().covers(gpu, nic);
        assert!(covers("0000:04:00.0@0000:03:00.0"));
        assert!(covers("*@0000:03:00.0") && covers("0000:04:00.0@*") && covers("*@*"));
        assert!(!covers("0000:03:00.0@0000:04:00.0"));
        assert!(!covers("*@0000:03:00.1") && !covers("0000:05:00.0@*"));
        for text in [
            "",
            "*",
            "@",
            "*@",
            "@*",
            "**@*",
            "*@*@*",
            "0000:04:00.0",
            "0000:04:00.0@x",
            "0000:04:00.0@0000:04:00.0",
        ] {
            assert_eq!(Pair::parse(text.as_bytes()), None, "{text:?}");
        }
    }

    #[test]
    fn link_registers_are_decoded() {
        assert_eq!((link_speed(0x1104), link_width(0x1104)), (16_000, 16));
        assert_eq!(link_speed(0), 0);
    }
}
