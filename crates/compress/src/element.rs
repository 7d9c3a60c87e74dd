/// The type of a tensor's numbers. Codecs compute with f32, which has all numbers of both types.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Element {
    /// bfloat16. Decoded numbers are rounded to it.
    Bf16,
    /// Single precision.
    F32,
}

impl Element {
    /// The bytes of a number.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}
