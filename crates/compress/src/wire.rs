/// Version of the wire form; the first byte.
pub const VERSION: u8 = 1;

/// Bytes before the body.
pub const HEADER: usize = 8;

/// Bytes of `n` elements sent as they are: the most that any encoded tensor of `n` elements takes.
pub const fn exact_bytes(n: usize) -> usize {
    HEADER + 4 * n
}

/// What the body is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Form {
    Exact = 0,
    Bf16 = 1,
    Int8 = 2,
    Int4 = 3,
    Nvfp4 = 4,
    TopK = 5,
}

impl Form {
    pub(crate) fn read(byte: u8) -> Option<Self> {
        let all = [Self::Exact, Self::Bf16, Self::Int8, Self::Int4, Self::Nvfp4, Self::TopK];
        all.into_iter().find(|f| *f as u8 == byte)
    }
}

/// Makes `out` an encoded tensor of `n` elements with an empty body of `body` bytes, and returns the body.
pub(crate) fn begin(out: &mut Vec<u8>, form: Form, detail: u8, n: u32, body: usize) -> &mut [u8] {
    out.clear();
    out.reserve(HEADER + body);
    out.extend([VERSION, form as u8, detail, 0]);
    out.extend(n.to_le_bytes());
    out.resize(HEADER + body, 0);
    &mut out[HEADER..]
}
