//! The questions of a run's owner to its broker. The owner is no member.

use serde::{Deserialize, Serialize};

/// The first and only message of an owner's connection. It may not be longer than
/// [`MAX_HELLO_BYTES`](crate::MAX_HELLO_BYTES).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// [`VERSION`](crate::VERSION).
    pub version: u32,
    /// The secret of the owner's ticket.
    pub secret: [u8; 16],
    /// The owner's question.
    pub question: Question,
}

/// A question or demand of an owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    /// To know how the run is doing. The answer is [`Answer::Status`](crate::Answer::Status).
    Status,
    /// To put a member out for good. Its key cannot come back.
    Kick {
        /// The member's name.
        name: String,
    },
    /// To take back the ticket for peers with this secret, or all of them. Members stay.
    Revoke {
        /// The ticket's secret.
        secret: Option<[u8; 16]>,
    },
    /// To have another ticket for peers. The answer is [`Answer::Ticket`](crate::Answer::Ticket).
    Invite {
        /// Seconds from now until it expires; `None` for never.
        seconds: Option<u64>,
        /// How many machines may join with it; `None` for any number.
        uses: Option<u32>,
    },
    /// To see the run's page. The answers are [`Answer::Page`](crate::Answer::Page), until the run is over or the owner
    /// closes the connection.
    Page,
}
