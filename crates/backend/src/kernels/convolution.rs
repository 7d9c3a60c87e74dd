//! The sizes of a convolution.

use std::ops::Range;

/// Sizes of a convolution: `x [n, c, h, w]`, weight `[o, c / groups, kh, kw]`, result `[n, o, oh, ow]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Convolution {
    /// Images.
    pub(crate) n: usize,
    /// Channels of the operand.
    pub(crate) c: usize,
    /// Height and width of the operand.
    pub(crate) input: [usize; 2],
    /// Channels of the result.
    pub(crate) o: usize,
    /// Height and width of the kernel.
    pub(crate) kernel: [usize; 2],
    /// Height and width of the result.
    pub(crate) output: [usize; 2],
    /// Vertical and horizontal stride.
    pub(crate) stride: [usize; 2],
    /// Zeros on both sides.
    pub(crate) padding: [usize; 2],
    /// Distance of the kernel's elements.
    pub(crate) dilation: [usize; 2],
    /// Groups of channels. Each group has its own kernels.
    pub(crate) groups: usize,
}

impl Convolution {
    /// Channels of a group, in and out.
    pub(super) fn group(&self) -> (usize, usize) {
        (self.c / self.groups, self.o / self.groups)
    }

    /// Elements of a kernel for one channel.
    pub(super) fn taps(&self) -> usize {
        self.kernel[0] * self.kernel[1]
    }

    /// Elements of an operand's channel.
    pub(super) fn plane_in(&self) -> usize {
        self.input[0] * self.input[1]
    }

    /// Elements of a result's channel.
    pub(super) fn plane_out(&self) -> usize {
        self.output[0] * self.output[1]
    }

    pub(super) fn check(&self, x: usize, weight: usize, y: usize) {
        let fits = x == self.n * self.c * self.plane_in()
            && weight == self.o * self.group().0 * self.taps()
            && y == self.n * self.o * self.plane_out();
        assert!(fits, "convolution: {x}, {weight} and {y} elements do not fit {self:?}");
    }

    /// Whether the patches are the operand itself.
    pub(super) fn pointwise(&self) -> bool {
        self.taps() == 1 && self.stride == [1, 1] && self.padding == [0, 0]
    }

    /// Positions of the result, in direction `d` (0 vertical, 1 horizontal), whose tap `k` lies inside the operand.
    pub(super) fn inside(&self, d: usize, k: usize) -> Range<usize> {
        let (stride, offset) = (self.stride[d], k * self.dilation[d]);
        let first = self.padding[d].saturating_sub(offset).div_ceil(stride);
        let end = (self.input[d] + self.padding[d]).saturating_sub(offset).div_ceil(stride);
        first.min(self.output[d])..end.min(self.output[d]).max(first.min(self.output[d]))
    }
}
