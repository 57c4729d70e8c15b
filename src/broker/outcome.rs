//! What may become of a published message, and why a batch may break off.

use std::time::Duration;

use super::amqp_code;

/// What became of one message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The message is in its queue.
    Confirmed,
    /// The broker returned the message: its queue does not exist.
    Returned(String),
    /// The queue belongs to a retry-scheduler, so nothing was sent.
    Forbidden(String),
    /// The broker would not take the message, for example because the queue is full.
    Refused,
    /// The message is larger than the broker takes.
    TooLarge(String),
    /// The broker closed the channel over this message's content, or would do so.
    Unacceptable(String),
    /// The broker did not confirm in time, or failed over this message, which was alone: it
    /// may yet be delivered.
    Unconfirmed,
    /// It is not known whether the message is in its queue.
    Unknown,
    /// The message was not published.
    Unsent,
}

/// Why not every message of a batch was answered. The channel cannot be used any more:
/// after `Channel`, [`Publisher::reopen`](super::Publisher::reopen) may open another; after the rest a new connection
/// is needed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The broker closed the channel, or all of the connection, over the content of one of
    /// several messages.
    #[error("RabbitMQ closed the channel: {0}")]
    Channel(String),
    /// The broker had an internal error. Some content causes one, so a message that was
    /// published alone is suspect.
    #[error("RabbitMQ failed over what it was sent: {0}")]
    Internal(String),
    /// The connection failed.
    #[error("RabbitMQ: {0}")]
    Connection(String),
    /// Confirms did not come in time.
    #[error("RabbitMQ did not confirm within {0:?}")]
    Timeout(Duration),
}

/// Notes why a batch broke off. After the broker has closed the channel over a message's
/// content, later publishes fail because the channel is gone, and such an error may be
/// seen first; so what the broker said of the content overwrites it.
pub(super) fn blame(fault: &mut Option<Fault>, error: &lapin::Error) {
    const CONTENT_TOO_LARGE: u16 = 311;
    const PRECONDITION_FAILED: u16 = 406;
    const FRAME_ERROR: u16 = 501;
    const SYNTAX_ERROR: u16 = 502;
    const INTERNAL_ERROR: u16 = 541;
    match amqp_code(error) {
        Some(CONTENT_TOO_LARGE | PRECONDITION_FAILED | FRAME_ERROR | SYNTAX_ERROR) => {
            *fault = Some(Fault::Channel(error.to_string()));
        }
        Some(INTERNAL_ERROR) => *fault = Some(Fault::Internal(error.to_string())),
        _ => {
            fault.get_or_insert_with(|| Fault::Connection(error.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    use lapin::{
        ChannelState, ErrorKind,
        protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError},
    };

    use super::*;

    fn said(kind: impl Into<AMQPErrorKind>) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), "said".into())).into()
    }

    #[test]
    fn a_message_is_blamed_for_its_content_whichever_error_is_seen_first() {
        let gone: lapin::Error =
            ErrorKind::InvalidChannelState(ChannelState::Error, "basic.publish").into();
        let by_content = [
            said(AMQPSoftError::PRECONDITIONFAILED),
            said(AMQPHardError::FRAMEERROR),
        ];
        for content in &by_content {
            for order in [[content, &gone], [&gone, content]] {
                let mut fault = None;
                for error in order {
                    blame(&mut fault, error);
                }
                assert!(matches!(fault, Some(Fault::Channel(_))), "{fault:?}");
            }
        }
    }

    #[test]
    fn an_outage_is_nobodys_fault() {
        let mut fault = None;
        for outage in [
            said(AMQPHardError::CONNECTIONFORCED),
            said(AMQPSoftError::ACCESSREFUSED),
        ] {
            blame(&mut fault, &outage);
            assert!(matches!(fault, Some(Fault::Connection(_))), "{fault:?}");
        }
    }
}
