// SPDX-License-Identifier: MIT OR Apache-2.0
//! Reads hex dumps as tools print them: the kernel's log, `hexdump -C`, `xxd`, `od -t x1`, words of rdma-core's messages.

/// More than any structure has.
const MOST: usize = 64 << 10;
/// Bytes of a line of `hexdump -C`.
const LINE: usize = 16;
/// What stands above a dump in the kernel's log (`dump_cqe`), and in rdma-core's messages.
const HEADINGS: [&str; 2] = ["dump error cqe", "got completion with error"];

/// The bytes of a dump. Words of several bytes are taken as they are written, first digit first.
pub fn parse(text: &str) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    // `hexdump -C` has its text between bars, leaves equal lines out for a star, and ends with an offset alone.
    let (mut hexdump, mut star) = (false, false);
    for (number, line) in text.lines().enumerate() {
        if HEADINGS.iter().any(|heading| line.contains(heading)) {
            continue;
        }
        hexdump |= line.contains('|');
        if hexdump && line.trim() == "*" && bytes.len() >= LINE {
            star = true;
            continue;
        }
        if star {
            let offset = line.split_whitespace().next().unwrap_or_default();
            let end = usize::from_str_radix(offset, 16).unwrap_or(0).min(MOST + 1);
            let repeated = bytes[bytes.len() - LINE..].to_vec();
            while bytes.len() < end {
                bytes.extend_from_slice(&repeated);
            }
            star = false;
        }
        if bytes.len() > MOST {
            return Err(format!(
                "more than {MOST} bytes: that is no dump of a structure"
            ));
        }
        if hexdump && !line.contains('|') && is_offset(line.trim()) {
            continue;
        }
        for word in content(line).split_whitespace() {
            let digits = word.strip_prefix("0x").unwrap_or(word);
            let pairs = digits.as_bytes().chunks(2);
            let parsed: Option<Vec<u8>> = pairs
                .map(|pair| Some(pair).filter(|pair| pair.len() == 2).and_then(byte))
                .collect();
            let parsed = parsed.ok_or_else(|| {
                format!(
                    "line {}: {word:?} is no whole number of bytes in hexadecimal",
                    number + 1
                )
            })?;
            bytes.extend(parsed);
        }
    }
    if bytes.is_empty() {
        Err("no bytes given".into())
    } else {
        Ok(bytes)
    }
}

fn byte(pair: &[u8]) -> Option<u8> {
    let digit = |c: u8| char::from(c).to_digit(16);
    u8::try_from((digit(pair[0])? << 4) | digit(pair[1])?).ok()
}

fn is_offset(word: &str) -> bool {
    word.len() >= 4 && word.bytes().all(|c| c.is_ascii_hexdigit())
}

/// A line without its offset and its column of text.
fn content(line: &str) -> &str {
    // hexdump -C: "00000000  00 11 …  22 33 …  |text|", and a last line with the offset alone.
    if let Some((before, _)) = line.split_once('|') {
        return before
            .trim_start()
            .split_once(' ')
            .map_or("", |(_, bytes)| bytes);
    }
    // The kernel ("[ 1.5] cqe_dump: 00000000: 00 11 …") and xxd ("00000000: 0011 …  text").
    for (at, _) in line.match_indices(": ") {
        let offset = line[..at].rsplit(' ').next().unwrap_or_default();
        if is_offset(offset) {
            let after = line[at + 2..].trim_start();
            return after.split_once("  ").map_or(after, |(bytes, _)| bytes);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn lines_that_hexdump_leaves_out_are_there() {
        let zeros = "00 ".repeat(16);
        let text = format!("00000000  {zeros} |................|\n*\n00000040\n");
        assert_eq!(parse(&text), Ok(vec![0; 64]));
        let text = format!("00000000  {zeros} |................|\n*\n00000030  01 |.|\n00000031\n");
        let mut want = vec![0; 48];
        want.push(1);
        assert_eq!(parse(&text), Ok(want));
        let endless = format!("00000000  {zeros} |................|\n*\nffffffffffff\n");
        assert!(parse(&endless).unwrap_err().contains("no dump"));
        assert!(parse("*\n").is_err());
    }

    #[test]
    fn dumps_of_common_tools() {
        let want = b"\x00\x11\xfe\xff";
        for text in [
            "0011feff",
            "00 11 FE ff\n",
            "0x0011feff",
            "0011 feff",
            "00000000: 00 11 fe ff",
            "[   12.345678] 00000000: 00 11 fe ff",
            "[   12.345678] cqe_dump: 00000000: 00 11 fe ff",
            "00000000: 0011 feff                                ....",
            "00000000  00 11 fe ff                                       |....|\n",
            "0011fe\nff\n",
            "infiniband mlx5_0: dump_cqe:272:(pid 0): dump error cqe\n00000000: 00 11 fe ff",
            "mlx5: host: got completion with error:\n0011feff",
            "00000000  00 11 fe ff                                       |....|\n00000004\n",
        ] {
            assert_eq!(parse(text).as_deref(), Ok(&want[..]), "{text}");
        }
    }

    #[test]
    fn anything_else_is_named() {
        for (text, word) in [
            ("00 1", "\"1\""),
            ("00\n0g", "line 2: \"0g\""),
            ("hello", "\"hello\""),
            ("", "no bytes"),
            ("é", "\"é\""),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
