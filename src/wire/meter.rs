//! Counts the bytes of the deliveries in an AMQP byte stream.
//!
//! It walks over the frames and reads no more than it needs: where a delivery begins
//! (`basic.deliver`), how long its body is (the content header), and where it ends.

use std::collections::VecDeque;

use lapin::protocol::constants::{FRAME_BODY, FRAME_HEADER, FRAME_METHOD};

/// A frame's type, channel and size.
const FRAME_HEAD: usize = 7;
/// The class and the method of a method frame.
const METHOD_HEAD: usize = 4;
/// The class, the weight and the body's size of a content header.
const CONTENT_HEAD: usize = 12;
const DELIVER: [u8; METHOD_HEAD] = [0, 60, 0, 60];

/// What has been read from a broker and not been released yet.
#[derive(Debug, Default)]
pub struct Meter {
    /// The beginning of the frame that is being read.
    head: [u8; FRAME_HEAD + CONTENT_HEAD],
    head_len: usize,
    /// How much of this frame is still to come after its head; none while the head is read.
    rest: Option<usize>,
    open: Option<Open>,
    /// The bytes of each delivery that was read to its end, in order.
    whole: VecDeque<usize>,
    held: usize,
}

/// A delivery of which not all has been read.
#[derive(Debug)]
struct Open {
    bytes: usize,
    /// How much of the body is still to come; none before the content header.
    body: Option<u64>,
}

impl Meter {
    /// The bytes of the deliveries that are not released, whole or not.
    pub fn held(&self) -> usize {
        self.held
    }

    /// How many whole deliveries are not released.
    pub fn whole(&self) -> usize {
        self.whole.len()
    }

    /// Releases the oldest whole deliveries.
    pub fn release(&mut self, deliveries: usize) {
        let deliveries = deliveries.min(self.whole.len());
        let released: usize = self.whole.drain(..deliveries).sum();
        self.held -= released;
    }

    /// Takes note of bytes that were read.
    pub fn read(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let Some(rest) = self.rest else {
                bytes = self.read_head(bytes);
                continue;
            };
            let step = rest.min(bytes.len());
            bytes = &bytes[step..];
            if let Some(open) = &mut self.open {
                open.bytes += step;
                self.held += step;
            }
            if step == rest {
                self.end_frame();
            } else {
                self.rest = Some(rest - step);
            }
        }
    }

    /// Reads the beginning of a frame, as far as it is known how long that is.
    fn read_head<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let size = self.frame_size();
        let wanted = FRAME_HEAD
            + match (self.head[0], size) {
                (FRAME_METHOD, Some(size)) => size.min(METHOD_HEAD),
                (FRAME_HEADER, Some(size)) => size.min(CONTENT_HEAD),
                _ => 0,
            };
        let step = (wanted - self.head_len).min(bytes.len());
        let (now, later) = bytes.split_at(step);
        self.head[self.head_len..self.head_len + step].copy_from_slice(now);
        self.head_len += step;
        // When the frame's size has just become known, more of the head may be wanted.
        if let Some(size) = size
            && self.head_len == wanted
        {
            self.begin_frame(size);
        }
        later
    }

    fn frame_size(&self) -> Option<usize> {
        let size: [u8; 4] = self.head[3..FRAME_HEAD].try_into().ok()?;
        (self.head_len >= FRAME_HEAD)
            .then(|| usize::try_from(u32::from_be_bytes(size)).unwrap_or(usize::MAX))
    }

    fn begin_frame(&mut self, size: usize) {
        let payload = &self.head[FRAME_HEAD..self.head_len];
        match (self.head[0], &mut self.open) {
            (FRAME_METHOD, _) if payload == DELIVER => {
                self.close();
                self.open = Some(Open {
                    bytes: 0,
                    body: None,
                });
            }
            (FRAME_HEADER, Some(open)) => {
                let body: Option<[u8; 8]> = payload.get(4..).and_then(|b| b.try_into().ok());
                open.body = Some(body.map_or(0, u64::from_be_bytes));
            }
            (FRAME_BODY, Some(open)) => {
                open.body = open.body.map(|left| left.saturating_sub(size as u64));
            }
            _ => {}
        }
        if let Some(open) = &mut self.open {
            open.bytes += self.head_len;
            self.held += self.head_len;
        }
        // A frame ends with one byte that its size does not count.
        let left = size.saturating_add(FRAME_HEAD + 1) - self.head_len;
        self.rest = Some(left);
    }

    fn end_frame(&mut self) {
        self.rest = None;
        self.head_len = 0;
        if self.open.as_ref().is_some_and(|open| open.body == Some(0)) {
            self.close();
        }
    }

    fn close(&mut self) {
        if let Some(open) = self.open.take() {
            self.whole.push_back(open.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
        let mut frame = vec![kind, 0, 1];
        frame.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        frame.extend(payload);
        frame.push(206);
        frame
    }

    /// A delivery whose body comes in frames of these sizes.
    fn delivery(bodies: &[usize]) -> Vec<u8> {
        let body: u64 = bodies.iter().map(|b| *b as u64).sum();
        let mut header = vec![0, 60, 0, 0];
        header.extend(body.to_be_bytes());
        header.extend([0, 0]);
        let mut bytes = frame(FRAME_METHOD, &[0, 60, 0, 60, 1, b'c', 9]);
        bytes.extend(frame(FRAME_HEADER, &header));
        for size in bodies {
            // The body looks like frames, which must not matter.
            bytes.extend(frame(
                FRAME_BODY,
                &[FRAME_METHOD, 0, 60][..].repeat(*size)[..*size],
            ));
        }
        bytes
    }

    #[test]
    fn only_deliveries_count_and_only_from_their_beginning_to_their_end() {
        let mut meter = Meter::default();
        let heartbeat = frame(8, &[]);
        let other = frame(FRAME_METHOD, &[0, 60, 0, 11]);
        let (small, large) = (delivery(&[]), delivery(&[5, 0, 300]));
        for bytes in [&heartbeat, &other, &small, &heartbeat, &large] {
            meter.read(bytes);
        }
        assert_eq!(
            (meter.whole(), meter.held()),
            (2, small.len() + large.len())
        );
        meter.release(1);
        assert_eq!((meter.whole(), meter.held()), (1, large.len()));
        meter.read(&delivery(&[100])[..60]);
        assert_eq!((meter.whole(), meter.held()), (1, large.len() + 60));
        meter.release(7);
        assert_eq!((meter.whole(), meter.held()), (0, 60));
        meter.read(&delivery(&[100])[60..]);
        assert_eq!((meter.whole(), meter.held()), (1, delivery(&[100]).len()));
    }

    proptest! {
        #[test]
        fn how_the_bytes_are_cut_does_not_matter(
            sizes in prop::collection::vec(prop::collection::vec(1..50_usize, 0..4), 0..8),
            cuts in prop::collection::vec(1..30_usize, 1..20),
        ) {
            let mut bytes = Vec::new();
            for bodies in &sizes {
                bytes.extend(delivery(bodies));
                bytes.extend(frame(8, &[]));
            }
            let expected: usize = sizes.iter().map(|bodies| delivery(bodies).len()).sum();
            let mut meter = Meter::default();
            let (mut rest, mut cuts) = (&bytes[..], cuts.iter().cycle());
            while !rest.is_empty() {
                let cut = rest.len().min(*cuts.next().unwrap());
                meter.read(&rest[..cut]);
                rest = &rest[cut..];
            }
            prop_assert_eq!(meter.whole(), sizes.len());
            prop_assert_eq!(meter.held(), expected);
        }

        #[test]
        fn any_bytes_are_taken(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let mut meter = Meter::default();
            meter.read(&bytes);
            meter.release(usize::MAX);
            meter.read(&bytes);
        }
    }
}
