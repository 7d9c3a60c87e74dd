//! Who watches a run.

use std::path::Path;

use fusionllm_data::Dataset;
use fusionllm_events::Event;
use fusionllm_transport::Ticket;
use fusionllm_workbench::model::Model;
use fusionllm_workspace::run_dir::Summary;

/// Watches a run.
pub trait Observer {
    /// Something happens.
    fn event(&mut self, event: &Event);

    /// The run has a directory.
    fn opened(&mut self, _directory: &Path) {}

    /// The run has a page at this address, which may have a secret in it.
    fn dashboard(&mut self, _url: &str) {}

    /// The run has a ticket with which joiners connect. It is a secret.
    fn invite(&mut self, _ticket: &Ticket) {}

    /// A plan is made for a model and its data.
    fn planned(&mut self, _model: &Model, _data: &Dataset) {}

    /// Peers load their shares: the bytes that the broker has sent, and those that it sends in total.
    fn loading(&mut self, _sent: u64, _total: u64) {}

    /// The figures of a run that is over.
    fn finished(&mut self, _summary: &Summary) {}
}
