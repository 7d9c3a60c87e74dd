//! Kernels: the backend trait, its implementations and the conformance suite.
