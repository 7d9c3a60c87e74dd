use fusionllm_graph::DType;
use fusionllm_graph::ops::{
    Embedding, EmbeddingDenseBackward, Gather, Index, IndexAdd, IndexPut, IndexSelect, Scatter, ScatterAdd, Sort, TopK,
};

use crate::conformance::case::Cases;

pub(super) fn cases(c: &mut Cases) -> Result<(), String> {
    embeddings(c);
    whole_slices(c);
    elements(c);
    advanced(c);
    orders(c);
    Ok(())
}

fn embeddings(c: &mut Cases) {
    for padding_idx in [None, Some(1)] {
        // Ids that repeat, in any shape.
        for ids in [&[4][..], &[2, 3], &[], &[0], &[2, 1, 2]] {
            let (w, ids) = (c.floats(&[3, 2]), c.indices(ids, 3));
            // The gradient of a padding row is 0 by decree, not by calculus.
            let case = c.add(Embedding { padding_idx }, vec![w, ids.clone()]);
            if padding_idx.is_some() {
                case.values_only();
            }
            let mut shape = ids.array.ty.shape.clone();
            shape.push(2);
            let g = c.floats(&shape);
            c.add(EmbeddingDenseBackward { num_weights: 3, padding_idx }, vec![g, ids]);
        }
    }
    c.add(Embedding { padding_idx: None }, vec![c.floats(&[2, 0]), c.indices(&[3], 2)]);
    c.add(Embedding { padding_idx: None }, vec![c.floats(&[5, 3]), c.indices(&[4], 5)]).half();
    for bad in [3, -1, i64::MIN, i64::MAX] {
        c.add(Embedding { padding_idx: None }, vec![c.floats(&[3, 2]), c.ints(&[3], &[0, 2, bad])]).fails();
        let op = EmbeddingDenseBackward { num_weights: 3, padding_idx: None };
        c.add(op, vec![c.floats(&[3, 2]), c.ints(&[3], &[0, 2, bad])]).fails();
    }
    c.add(Embedding { padding_idx: None }, vec![c.floats(&[0, 2]), c.ints(&[1], &[0])]).fails();
}

fn whole_slices(c: &mut Cases) {
    for (shape, dim, count) in
        [(&[3, 4][..], 0, 5), (&[3, 4], 1, 2), (&[2, 3, 2], 1, 4), (&[3], 0, 1), (&[3, 2], 0, 0), (&[2, 0], 0, 3)]
    {
        let ids = c.indices(&[count], shape[dim]);
        let mut taken = shape.to_vec();
        taken[dim] = count;
        for (x, source) in
            [(c.floats(shape), c.floats(&taken)), (c.numbers(DType::I64, shape), c.numbers(DType::I64, &taken))]
        {
            c.add(IndexSelect { dim }, vec![x.clone(), ids.clone()]);
            c.add(IndexAdd { dim }, vec![x, ids.clone(), source]);
        }
        c.add(IndexSelect { dim }, vec![c.bools(shape), ids]);
    }
    for bad in [3, -1] {
        c.add(IndexSelect { dim: 1 }, vec![c.floats(&[2, 3]), c.ints(&[2], &[0, bad])]).fails();
        c.add(IndexAdd { dim: 1 }, vec![c.floats(&[2, 3]), c.ints(&[2], &[0, bad]), c.floats(&[2, 2])]).fails();
    }
}

fn elements(c: &mut Cases) {
    for (shape, dim, index) in [
        (&[3, 4][..], 0, &[2, 4][..]),
        (&[3, 4], 1, &[3, 6]),
        (&[3, 4], 1, &[2, 1]),
        (&[2, 3, 2], 1, &[2, 5, 1]),
        (&[4], 0, &[3]),
        (&[4], 0, &[0]),
        (&[2, 3], 0, &[0, 3]),
    ] {
        let ids = c.indices(index, shape[dim]);
        for (x, source) in
            [(c.floats(shape), c.floats(index)), (c.numbers(DType::I64, shape), c.numbers(DType::I64, index))]
        {
            c.add(Gather { dim }, vec![x.clone(), ids.clone()]);
            c.add(ScatterAdd { dim }, vec![x.clone(), ids.clone(), source.clone()]);
            // Where the index names a place twice, the last write stays; its gradient is defined for distinct places
            // alone.
            c.add(Scatter { dim }, vec![x, ids.clone(), source]).values_only();
        }
        c.add(Gather { dim }, vec![c.bools(shape), ids]);
    }
    let distinct = c.ints(&[2, 3], &[2, 0, 1, 0, 3, 2]);
    c.add(Scatter { dim: 0 }, vec![c.floats(&[4, 3]), distinct, c.floats(&[2, 3])]);
    let (last, source) = (c.ints(&[1, 4], &[1, 1, 0, 1]), c.given(&[1, 4], &[1.0, 2.0, 3.0, 4.0]));
    c.add(Scatter { dim: 1 }, vec![c.floats(&[1, 3]), last, source]).values_only();
    for bad in [4, -1] {
        let ids = c.ints(&[2, 1], &[0, bad]);
        c.add(Gather { dim: 1 }, vec![c.floats(&[2, 4]), ids.clone()]).fails();
        for accumulate in [true, false] {
            let operands = vec![c.floats(&[2, 4]), ids.clone(), c.floats(&[2, 1])];
            match accumulate {
                true => c.add(ScatterAdd { dim: 1 }, operands).fails(),
                false => c.add(Scatter { dim: 1 }, operands).fails(),
            };
        }
    }
}

fn advanced(c: &mut Cases) {
    // Operand, the marked dimensions, shapes of the indices, shape of the result.
    type Layout = (&'static [usize], &'static [bool], &'static [&'static [usize]], &'static [usize]);
    let layouts: [Layout; 8] = [
        (&[3, 4], &[true, false], &[&[5]], &[5, 4]),
        (&[3, 4], &[false, true], &[&[2, 2]], &[3, 2, 2]),
        (&[3, 4], &[true, true], &[&[2, 1], &[3]], &[2, 3]),
        (&[2, 3, 4], &[true, false, true], &[&[5], &[5]], &[5, 3]),
        (&[2, 3, 4], &[false, true, true], &[&[5], &[1]], &[2, 5]),
        (&[3], &[true], &[&[]], &[]),
        (&[3, 2], &[true, false], &[&[0]], &[0, 2]),
        (&[2, 3, 2, 2], &[false, true, false, true], &[&[2], &[3, 1]], &[3, 2, 2, 2]),
    ];
    for (shape, marked, ids, out) in layouts {
        let sizes = shape.iter().zip(marked).filter(|(_, m)| **m).map(|(n, _)| *n);
        let ids: Vec<_> = ids.iter().zip(sizes).map(|(s, n)| c.indices(s, n)).collect();
        let indexed = marked.to_vec();
        for integers in [false, true] {
            let draw = |s: &[usize]| if integers { c.numbers(DType::I64, s) } else { c.floats(s) };
            let (x, values) = (draw(shape), draw(out));
            let with = |front: &[&crate::conformance::Operand]| {
                front.iter().map(|o| (*o).clone()).chain(ids.iter().cloned()).collect::<Vec<_>>()
            };
            let (read, write) = (with(&[&x]), with(&[&x, &values]));
            c.add(Index { indexed: indexed.clone() }, read);
            c.add(IndexPut { indexed: indexed.clone(), accumulate: true }, write.clone());
            c.add(IndexPut { indexed: indexed.clone(), accumulate: false }, write).values_only();
        }
    }
    let once = vec![c.floats(&[4, 2]), c.floats(&[3, 2]), c.ints(&[3], &[2, 0, 3])];
    c.add(IndexPut { indexed: vec![true, false], accumulate: false }, once);
    for bad in [3, -1] {
        let ids = c.ints(&[2], &[1, bad]);
        let indexed = vec![true, false];
        c.add(Index { indexed: indexed.clone() }, vec![c.floats(&[3, 2]), ids.clone()]).fails();
        for accumulate in [false, true] {
            let operands = vec![c.floats(&[3, 2]), c.floats(&[2, 2]), ids.clone()];
            c.add(IndexPut { indexed: indexed.clone(), accumulate }, operands).fails();
        }
    }
}

fn orders(c: &mut Cases) {
    for (shape, dim, k) in
        [(&[2, 5][..], 1, 3), (&[4, 3], 0, 4), (&[2, 3, 2], 1, 1), (&[4], 0, 0), (&[1], 0, 1), (&[0, 3], 1, 2)]
    {
        for largest in [true, false] {
            c.add(TopK { k, dim, largest }, vec![c.distinct(shape)]);
            c.add(Sort { dim, descending: largest }, vec![c.distinct(shape)]);
            c.add(TopK { k, dim, largest }, vec![c.numbers(DType::I64, shape)]);
            c.add(Sort { dim, descending: largest }, vec![c.numbers(DType::I64, shape)]);
        }
    }
    for largest in [true, false] {
        // Equal elements keep their order.
        let x = c.given(&[7], &[1.0, 2.0, 1.0, 2.0, 0.0, 2.0, 1.0]);
        c.add(Sort { dim: 0, descending: largest }, vec![x.clone()]).values_only();
        c.add(TopK { k: 4, dim: 0, largest }, vec![x]).values_only();
    }
}
