//! The OP-DAG: typed operators, shapes, autodiff and model families.
