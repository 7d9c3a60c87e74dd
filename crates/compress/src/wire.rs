//! The header of the wire form.

use crate::element::Element;

/// Version of the wire form, the first byte of every encoded tensor.
pub const VERSION: u8 = 3;

/// Size of the header, before the body.
pub const HEADER_BYTES: usize = 8;

/// The size of `n` elements in the exact form, in bytes. No encoded tensor of `n` elements is larger.
pub const fn exact_bytes(n: usize, element: Element) -> usize {
    HEADER_BYTES + element.bytes() * n
}

/// The form of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Form {
    Exact = 0,
    Bf16 = 1,
    Int = 2,
    Nvfp4 = 3,
    TopK = 4,
    Masked = 5,
}

impl Form {
    pub(crate) fn from_byte(byte: u8) -> Option<Self> {
        let all = [Self::Exact, Self::Bf16, Self::Int, Self::Nvfp4, Self::TopK, Self::Masked];
        all.into_iter().find(|f| *f as u8 == byte)
    }
}

/// The detail of rotated integers: this, and the number of bits.
pub(crate) const ROTATED: u8 = 16;

/// Writes the header of an encoded tensor of `n` elements to `out`, and returns its body of `body` zero bytes.
pub(crate) fn begin(out: &mut Vec<u8>, form: Form, detail: u8, n: u32, body: usize) -> &mut [u8] {
    out.clear();
    out.reserve(HEADER_BYTES + body);
    out.extend([VERSION, form as u8, detail, 0]);
    out.extend(n.to_le_bytes());
    out.resize(HEADER_BYTES + body, 0);
    &mut out[HEADER_BYTES..]
}
