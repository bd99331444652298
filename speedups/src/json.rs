//! Reads the envelope of an event: the fields that are needed before its class is known.
//!
//! The whole body is checked, but nothing is built. `None` means that the body is not plainly valid I-JSON with a
//! plain envelope: Python reads it then, and reports what is wrong. This may happen for valid bodies too, if they
//! are unusual; the opposite must never happen.

use std::collections::HashSet;

/// Levels of arrays and objects; Python accepts more.
const MAX_DEPTH: usize = 64;
/// Characters of a number; Python accepts more.
const MAX_NUMBER: usize = 300;
/// Names that are compared one by one; with more, a set finds duplicates.
const FEW_NAMES: usize = 16;
/// Characters of an event id, as `MAX_ID_LENGTH` in `integr8s_idem.events`.
const MAX_ID: usize = 1024;

/// Type and version of an event whose id is valid.
pub struct Envelope<'a> {
    pub event_type: &'a str,
    pub version: Option<&'a str>,
}

/// Return the envelope of `body`.
pub fn envelope(body: &[u8]) -> Option<Envelope<'_>> {
    let text = std::str::from_utf8(body).ok()?;
    let mut fields = Fields::default();
    let mut reader = Reader { text, bytes: body, at: 0 };
    reader.skip_space();
    reader.object(1, Some(&mut fields))?;
    reader.skip_space();
    if reader.at != body.len() {
        return None;
    }
    let id = fields.event_id?;
    if id.is_empty() || id.len() > MAX_ID || !id.is_ascii() {
        return None;
    }
    Some(Envelope { event_type: fields.event_type?, version: fields.version })
}

#[derive(Default)]
struct Fields<'a> {
    event_type: Option<&'a str>,
    event_id: Option<&'a str>,
    version: Option<&'a str>,
}

impl<'a> Fields<'a> {
    /// Return the field called `name`, if it belongs to the envelope.
    fn named(&mut self, name: &str) -> Option<&mut Option<&'a str>> {
        match name {
            "event_type" => Some(&mut self.event_type),
            "event_id" => Some(&mut self.event_id),
            "event_version" => Some(&mut self.version),
            _ => None,
        }
    }
}

/// The names of one object.
struct Names<'a> {
    few: [&'a str; FEW_NAMES],
    count: usize,
    many: HashSet<&'a str>,
}

impl<'a> Names<'a> {
    fn new() -> Self {
        Self { few: [""; FEW_NAMES], count: 0, many: HashSet::new() }
    }

    /// Add a name; `None` if it is a duplicate.
    fn add(&mut self, name: &'a str) -> Option<()> {
        if self.count < FEW_NAMES {
            if self.few[..self.count].contains(&name) {
                return None;
            }
            self.few[self.count] = name;
        } else {
            if self.count == FEW_NAMES {
                self.many.extend(self.few);
            }
            if !self.many.insert(name) {
                return None;
            }
        }
        self.count += 1;
        Some(())
    }
}

/// Characters of a string that stand for themselves.
static PLAIN: [bool; 256] = {
    let mut table = [true; 256];
    let mut code = 0;
    while code < 0x20 {
        table[code] = false;
        code += 1;
    }
    table[b'"' as usize] = false;
    table[b'\\' as usize] = false;
    table
};

struct Reader<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\n' | b'\t' | b'\r')) {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Option<()> {
        if self.peek()? != byte {
            return None;
        }
        self.at += 1;
        Some(())
    }

    /// Read a string, and return it if it has no escapes.
    fn string(&mut self) -> Option<Option<&'a str>> {
        self.expect(b'"')?;
        let start = self.at;
        let mut is_plain = true;
        loop {
            let byte = self.peek()?;
            if PLAIN[byte as usize] {
                self.at += 1;
            } else if byte == b'"' {
                let found = self.text.get(start..self.at)?;
                self.at += 1;
                return Some(is_plain.then_some(found));
            } else if byte == b'\\' {
                is_plain = false;
                self.escape()?;
            } else {
                return None;
            }
        }
    }

    fn plain_string(&mut self) -> Option<&'a str> {
        self.string()?
    }

    fn escape(&mut self) -> Option<()> {
        match *self.bytes.get(self.at + 1)? {
            b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't' => self.at += 2,
            b'u' => {
                let digits = self.bytes.get(self.at + 2..self.at + 6)?;
                let is_surrogate = digits[0].eq_ignore_ascii_case(&b'd') && digits[1] >= b'8';
                if is_surrogate || !digits.iter().all(u8::is_ascii_hexdigit) {
                    return None;
                }
                self.at += 6;
            }
            _ => return None,
        }
        Some(())
    }

    fn digits(&mut self) -> Option<()> {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        (self.at > start).then_some(())
    }

    fn number(&mut self) -> Option<()> {
        let start = self.at;
        if self.peek() == Some(b'-') {
            self.at += 1;
        }
        if self.peek() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        let mut is_integer = true;
        if self.peek() == Some(b'.') {
            is_integer = false;
            self.at += 1;
            self.digits()?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            is_integer = false;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            self.digits()?;
        }
        let digits = self.text.get(start..self.at)?;
        if digits.len() > MAX_NUMBER {
            return None;
        }
        (is_integer || digits.parse::<f64>().ok()?.is_finite()).then_some(())
    }

    fn word(&mut self, word: &[u8]) -> Option<()> {
        if !self.bytes.get(self.at..)?.starts_with(word) {
            return None;
        }
        self.at += word.len();
        Some(())
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        match self.peek()? {
            b'"' => self.string().map(|_| ()),
            b'{' => self.object(depth + 1, None),
            b'[' => self.array(depth + 1),
            b't' => self.word(b"true"),
            b'f' => self.word(b"false"),
            b'n' => self.word(b"null"),
            _ => self.number(),
        }
    }

    fn array(&mut self, depth: usize) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.expect(b'[')?;
        self.skip_space();
        if self.peek()? == b']' {
            self.at += 1;
            return Some(());
        }
        loop {
            self.skip_space();
            self.value(depth)?;
            self.skip_space();
            if self.peek()? == b']' {
                self.at += 1;
                return Some(());
            }
            self.expect(b',')?;
        }
    }

    /// Read an object; `fields` receives those of the envelope.
    fn object(&mut self, depth: usize, mut fields: Option<&mut Fields<'a>>) -> Option<()> {
        if depth > MAX_DEPTH {
            return None;
        }
        self.expect(b'{')?;
        self.skip_space();
        if self.peek()? == b'}' {
            self.at += 1;
            return Some(());
        }
        let mut names = Names::new();
        loop {
            self.skip_space();
            let name = self.plain_string()?;
            names.add(name)?;
            self.skip_space();
            self.expect(b':')?;
            self.skip_space();
            match fields.as_deref_mut().and_then(|fields| fields.named(name)) {
                Some(field) => *field = Some(self.plain_string()?),
                None => self.value(depth)?,
            }
            self.skip_space();
            if self.peek()? == b'}' {
                self.at += 1;
                return Some(());
            }
            self.expect(b',')?;
        }
    }
}
