//! The part of the zip format (PKWARE's APPNOTE 6.3) that PyTorch writes.
//!
//! Members are not compressed. The file starts with the first member and ends with the directory. It may have the
//! records for files over 4 GiB. Everything else is refused, so the reader never has to search or guess.
//!
//! ```text
//! member*:    "PK\3\4" … name length u16, extra length u16, name, extra, bytes
//! directory:  "PK\1\2" … CRC u32, size u32 twice, name, extra and comment lengths u16, … member's offset u32,
//!             name, extra, comment                                                                 (one per member)
//! zip64:      "PK\6\6" … count u64 twice, size u64, offset u64;   "PK\6\7" … its offset u64 …    (optional)
//! end:        "PK\5\6" … count u16 twice, size u32, offset u32, comment length u16 = 0
//! ```

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};

/// A zip file, with its directory read.
pub(crate) struct Zip<S> {
    source: S,
    /// The size of the file in bytes.
    length: u64,
    members: BTreeMap<String, Member>,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    offset: u64,
    size: u64,
    crc: u32,
    stored: bool,
}

/// The sizes of the fixed parts of the records, in bytes.
const END: u64 = 22;
const LOCATOR: u64 = 20;
const END_64: u64 = 56;
const ENTRY: usize = 46;
const HEADER: u64 = 30;

fn u16_at(b: &[u8], at: usize) -> u64 {
    b.get(at..at + 2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]).into())
}

fn u32_at(b: &[u8], at: usize) -> u64 {
    b.get(at..at + 4).map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]).into())
}

fn u64_at(b: &[u8], at: usize) -> u64 {
    u32_at(b, at) | u32_at(b, at + 4) << 32
}

impl<S: Read + Seek> Zip<S> {
    /// Reads the directory.
    pub(crate) fn open(mut source: S) -> Result<Self, String> {
        let length = source.seek(SeekFrom::End(0)).map_err(message)?;
        let mut zip = Self { source, length, members: BTreeMap::new() };
        let at = length.checked_sub(END).ok_or("it is too short")?;
        let end = zip.bytes(at, END)?;
        if !end.starts_with(b"PK\x05\x06") || u16_at(&end, 20) != 0 {
            return Err("it does not end like a zip file: it has another format or is truncated".into());
        }
        let (mut count, mut size, mut offset) = (u16_at(&end, 10), u32_at(&end, 12), u32_at(&end, 16));
        let mut limit = at;
        // The records for large files replace those of the end record.
        if let Some(locator) = at.checked_sub(LOCATOR)
            && let found = zip.bytes(locator, LOCATOR)?
            && found.starts_with(b"PK\x06\x07")
        {
            limit = u64_at(&found, 8);
            if limit.checked_add(END_64).is_none_or(|end| end > locator) {
                return Err("the end of its directory is out of range".into());
            }
            let end = zip.bytes(limit, END_64)?;
            if !end.starts_with(b"PK\x06\x06") {
                return Err("the end of its directory is damaged".into());
            }
            (count, size, offset) = (u64_at(&end, 32), u64_at(&end, 40), u64_at(&end, 48));
        }
        if offset.checked_add(size).is_none_or(|end| end > limit) {
            return Err("its directory is out of range".into());
        }
        let directory = zip.bytes(offset, size)?;
        let mut rest = &directory[..];
        for _ in 0..count {
            rest = zip.entry(rest, offset)?;
        }
        Ok(zip)
    }

    /// Reads one entry of the directory and returns the rest. The directory starts at `limit`, after all members.
    fn entry<'b>(&mut self, entry: &'b [u8], limit: u64) -> Result<&'b [u8], String> {
        let damaged = || "its directory is damaged".to_owned();
        if !entry.starts_with(b"PK\x01\x02") || entry.len() < ENTRY {
            return Err(damaged());
        }
        let lengths = [28, 30, 32].map(|at| u16_at(entry, at) as usize);
        let name = entry.get(ENTRY..ENTRY + lengths[0]).ok_or_else(damaged)?;
        let extra = entry.get(ENTRY + lengths[0]..ENTRY + lengths[0] + lengths[1]).ok_or_else(damaged)?;
        let name = std::str::from_utf8(name).map_err(|_| damaged())?;
        let (mut packed, mut size, mut offset) = (u32_at(entry, 20), u32_at(entry, 24), u32_at(entry, 42));
        // Numbers that need more than 32 bits are in the extra field, in this order.
        let mut wide = wide_fields(extra);
        for field in [&mut size, &mut packed, &mut offset] {
            if *field == u64::from(u32::MAX) {
                *field = wide.next().ok_or_else(damaged)?;
            }
        }
        if offset.checked_add(size).is_none_or(|end| end > limit) {
            return Err(format!("its member {name} claims {size} bytes, more than the file has"));
        }
        // Bit 0: encrypted. Method 0: stored.
        let stored = u16_at(entry, 8) & 1 == 0 && u16_at(entry, 10) == 0 && packed == size;
        let member = Member { offset, size, crc: u32_at(entry, 16) as u32, stored };
        if self.members.insert(name.to_owned(), member).is_some() {
            return Err(format!("it has two members {name}"));
        }
        entry.get(ENTRY + lengths.iter().sum::<usize>()..).ok_or_else(damaged)
    }

    fn bytes(&mut self, at: u64, count: u64) -> Result<Vec<u8>, String> {
        // Check against the size of the file before allocating.
        if at.checked_add(count).is_none_or(|end| end > self.length) {
            return Err("it is truncated".into());
        }
        self.source.seek(SeekFrom::Start(at)).map_err(message)?;
        let mut bytes = Vec::with_capacity(count as usize);
        let read = (&mut self.source).take(count).read_to_end(&mut bytes).map_err(message)?;
        if read as u64 == count { Ok(bytes) } else { Err("it is truncated".into()) }
    }

    /// The size of the file in bytes.
    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// The names of all members, sorted.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.members.keys().map(String::as_str)
    }

    /// Whether there is a member of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.members.contains_key(name)
    }

    /// The content of a member. Fails if it has more than `limit` bytes.
    pub(crate) fn read(&mut self, name: &str, limit: u64) -> Result<Vec<u8>, String> {
        let member = *self.members.get(name).ok_or("it does not exist")?;
        if !member.stored {
            return Err("it is compressed or encrypted, but torch.export.save never compresses or encrypts".into());
        }
        if member.size > limit {
            return Err(format!("it has {} bytes, but at most {limit} are allowed", member.size));
        }
        let header = self.bytes(member.offset, HEADER)?;
        if !header.starts_with(b"PK\x03\x04") {
            return Err("it is not at the offset in the directory".into());
        }
        let lengths = HEADER + u16_at(&header, 26) + u16_at(&header, 28);
        let start = member.offset.checked_add(lengths).ok_or("it is truncated")?;
        let bytes = self.bytes(start, member.size)?;
        match crc32fast::hash(&bytes) == member.crc {
            true => Ok(bytes),
            false => Err("its checksum is wrong: the file is damaged".into()),
        }
    }
}

fn message(e: io::Error) -> String {
    e.to_string()
}

/// The 64-bit numbers in the extra field with id 1.
fn wide_fields(mut extra: &[u8]) -> std::vec::IntoIter<u64> {
    while extra.len() >= 4 {
        let (id, length) = (u16_at(extra, 0), u16_at(extra, 2) as usize);
        let Some(field) = extra.get(4..4 + length) else { break };
        if id == 1 {
            let fields: Vec<u64> = field.chunks_exact(8).map(|c| u64_at(c, 0)).collect();
            return fields.into_iter();
        }
        extra = &extra[4 + length..];
    }
    Vec::new().into_iter()
}
