//! The checks that make a graph from a file or a peer safe to run.

use std::collections::{BTreeSet, HashMap};

use crate::{DType, Graph, GraphError, Node, NodeId, Phase, TensorType, ValueId, ValueKind};

impl Graph {
    /// Checks every reference, the order of the nodes, and every type by the operator's own rule.
    ///
    /// Code that runs a graph relies on these checks, so a graph from a file or a peer must pass them first.
    pub fn validate(&self) -> Result<(), GraphError> {
        self.check_values()?;
        self.check_nodes()?;
        self.check_outputs()?;
        self.check_state_updates()?;
        self.check_constants()
    }

    fn broken<T>(&self, reason: String) -> Result<T, GraphError> {
        Err(GraphError::Structure { graph: self.name.clone(), reason })
    }

    fn check_values(&self) -> Result<(), GraphError> {
        let mut names = BTreeSet::new();
        for v in &self.values {
            if !names.insert(v.name.as_str()) {
                return self.broken(format!("two values are named {:?}", v.name));
            }
            if let Err(reason) = v.ty.check() {
                return self.broken(format!("value {:?}: {reason}", v.name));
            }
            match &v.kind {
                ValueKind::RngKey if v.ty != TensorType::new(DType::I64, []) => {
                    return self.broken(format!("random key {:?} must be an i64 scalar, but is {}", v.name, v.ty));
                }
                ValueKind::Parameter(_) | ValueKind::Frozen(_) if !v.ty.dtype.is_float() => {
                    return self.broken(format!("parameter {:?} must have floats, but is {}", v.name, v.ty));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_nodes(&self) -> Result<(), GraphError> {
        let mut available: Vec<bool> =
            self.values.iter().map(|v| !matches!(v.kind, ValueKind::Result { .. })).collect();
        let mut names = BTreeSet::new();
        for (n, node) in self.nodes.iter().enumerate() {
            let id = NodeId(n as u32);
            if !names.insert(node.name.as_str()) {
                return self.broken(format!("{} has the name of an earlier node", describe(id, node)));
            }
            self.check_operands(id, node, &available)?;
            self.check_results(id, node, &mut available)?;
            // The origins of an evaluation graph's nodes are nodes of another graph.
            let forward = |o: NodeId| self.nodes[..n].get(o.index()).is_some_and(|f| f.phase == Phase::Forward);
            if node.phase != Phase::Forward && !node.origin.is_some_and(forward) {
                let node = describe(id, node);
                return self.broken(format!("{node} is a backward node, but its origin is no earlier forward node"));
            }
        }
        match available.iter().position(|a| !a) {
            Some(v) => self.broken(format!("no node computes {:?}", self.values[v].name)),
            None => Ok(()),
        }
    }

    fn check_operands(&self, id: NodeId, node: &Node, available: &[bool]) -> Result<(), GraphError> {
        for v in &node.inputs {
            let node = || describe(id, node);
            match available.get(v.index()) {
                None => return self.broken(format!("{} reads {v}, which does not exist", node())),
                Some(false) => {
                    return self.broken(format!(
                        "{} reads {v} before it is computed: the nodes are out of order or form a cycle",
                        node()
                    ));
                }
                Some(true) => {}
            }
        }
        Ok(())
    }

    fn check_results(&self, id: NodeId, node: &Node, available: &mut [bool]) -> Result<(), GraphError> {
        let types = self.types(&node.inputs);
        let results = node.op.infer(&types).map_err(|reason| GraphError::Operand {
            op: node.op.name().into(),
            name: node.name.clone(),
            operands: types.iter().map(|t| (*t).clone()).collect(),
            reason,
        })?;
        let at = || describe(id, node);
        if results.len() != node.outputs.len() {
            let (have, declared) = (results.len(), node.outputs.len());
            return self.broken(format!("{} has {have} results, but {declared} are declared", at()));
        }
        for (i, (v, ty)) in node.outputs.iter().zip(&results).enumerate() {
            let here = ValueKind::Result { node: id, index: i as u32 };
            match self.values.get(v.index()) {
                Some(value) if value.kind == here && value.ty == *ty => available[v.index()] = true,
                Some(value) if value.kind == here => {
                    return self.broken(format!("{}: result {i} is {ty}, but {} is declared", at(), value.ty));
                }
                _ => {
                    return self.broken(format!("{}: result {i} is {v}, but {v} names another producer", at()));
                }
            }
        }
        Ok(())
    }

    fn check_exists(&self, what: &str, v: ValueId) -> Result<(), GraphError> {
        match self.values.get(v.index()) {
            Some(_) => Ok(()),
            None => self.broken(format!("{what} is {v}, which does not exist")),
        }
    }

    fn check_outputs(&self) -> Result<(), GraphError> {
        self.outputs.iter().try_for_each(|(name, v)| self.check_exists(&format!("output {name:?}"), *v))
    }

    fn check_state_updates(&self) -> Result<(), GraphError> {
        let mut updated = BTreeSet::new();
        for u in &self.state_updates {
            self.check_exists("the buffer of a state update", u.buffer)?;
            self.check_exists("the value of a state update", u.value)?;
            let buffer = self.value(u.buffer);
            if !matches!(buffer.kind, ValueKind::Buffer(_)) {
                return self.broken(format!("{:?} is updated, but it is not a buffer", buffer.name));
            }
            if !updated.insert(u.buffer) {
                return self.broken(format!("buffer {:?} is updated twice", buffer.name));
            }
            let new = self.ty(u.value);
            if buffer.ty != *new {
                return self.broken(format!("buffer {:?} is {}, but its update is {new}", buffer.name, buffer.ty));
            }
        }
        Ok(())
    }

    fn check_constants(&self) -> Result<(), GraphError> {
        let constants = self.values.iter().filter(|v| v.kind == ValueKind::Constant);
        let types: HashMap<&str, &TensorType> = constants.map(|v| (v.name.as_str(), &v.ty)).collect();
        for (name, tensor) in &self.constants {
            if types.get(name.as_str()) != Some(&tensor.ty()) {
                return self.broken(format!("constant {name:?} does not match the value of that name"));
            }
        }
        Ok(())
    }
}

fn describe(id: NodeId, node: &Node) -> String {
    format!("node {id} {:?} ({})", node.name, node.op.name())
}
