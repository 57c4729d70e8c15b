//! Loops: a message that comes back under a new id each time, so that its retries are never
//! spent.
//!
//! A producer that mints an id for each failure makes of one message endless tasks, each in
//! order by itself. What they share is the queue and the body. So [`LoopWatch`] counts, for
//! each queue and body, the generations of new ids: an equal body is of the next generation
//! only if it comes after the task of the one before was due, because only then it can be
//! that message, sent back and failed again. Any number of equal bodies at once are one
//! generation; a loop is one generation a round.
//!
//! An equal body under a new id may also be another message, published later. If that one
//! fails again under its own id, ids are kept, and the count begins anew
//! ([`LoopWatch::came_back`]). If it does not, it cannot be told from a loop: what is found
//! here is suspected, not proven.

use std::{hash::BuildHasher, hash::Hasher, time::Duration};

use foldhash::quality::FixedState;

/// How many bodies are remembered in groups of [`GROUP`]; in all 131,072 of them, in 3 MiB,
/// which are taken group by group.
const GROUPS: usize = 1 << 14;
/// Within a group, the one that came last the longest ago is forgotten for a new one.
const GROUP: usize = 8;

/// A body that does not come within this time after its task was due is forgotten.
const WINDOW: Duration = Duration::from_secs(600);

/// A generation lasts this long at least: under a policy with almost no delay, equal bodies
/// that were published together would else be taken for rounds of one message.
const SHORTEST_ROUND: Duration = Duration::from_secs(1);

/// A queue and a body, as [`LoopWatch`] knows them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(u64);

impl Fingerprint {
    /// The hash of a queue and a body. It is fast, and no proof against those who search
    /// for collisions; the seed keeps them from knowing any.
    pub fn of(seed: u64, queue: &str, body: &[u8]) -> Self {
        let mut hasher = FixedState::with_seed(seed).build_hasher();
        hasher.write_usize(queue.len());
        hasher.write(queue.as_bytes());
        hasher.write(body);
        Self(hasher.finish())
    }

    fn group(self) -> usize {
        let [a, b, ..] = self.0.to_le_bytes();
        usize::from(u16::from_le_bytes([a, b])) % GROUPS
    }
}

/// What is known of one queue and body. Times are milliseconds since the watch began.
#[derive(Clone, Copy, Default)]
struct Seen {
    fingerprint: u64,
    /// When the task of this generation is due; an equal body after that is of the next.
    due_ms: u64,
    /// 0: there is nothing here.
    generations: u32,
}

impl Seen {
    fn is(&self, fingerprint: Fingerprint, now_ms: u64) -> bool {
        self.fingerprint == fingerprint.0
            && self.generations > 0
            && now_ms <= self.due_ms.saturating_add(millis(WINDOW))
    }

    fn generation_at(&self, now_ms: u64) -> u32 {
        self.generations
            .saturating_add(u32::from(now_ms >= self.due_ms))
    }
}

/// Counts generations of equal bodies, in a fixed amount of memory. `now` is the time since
/// any moment, the same for all calls.
pub struct LoopWatch {
    groups: Box<[Option<Box<[Seen; GROUP]>>]>,
}

impl Default for LoopWatch {
    fn default() -> Self {
        Self {
            groups: vec![None; GROUPS].into_boxed_slice(),
        }
    }
}

impl LoopWatch {
    /// The generation that this body would be of, if it came now under a new id.
    pub fn generation(&self, fingerprint: Fingerprint, now: Duration) -> u32 {
        let now_ms = millis(now);
        let group = &self.groups[fingerprint.group()];
        let mut group = group.iter().flat_map(|group| group.iter());
        let seen = group.find(|seen| seen.is(fingerprint, now_ms));
        seen.map_or(1, |seen| seen.generation_at(now_ms))
    }

    /// This body came under a new id, and its task is due after `delay`. Returns its
    /// generation.
    pub fn came_new(&mut self, fingerprint: Fingerprint, now: Duration, delay: Duration) -> u32 {
        let now_ms = millis(now);
        let group = self.groups[fingerprint.group()].get_or_insert_default();
        let place = group.iter().position(|seen| seen.is(fingerprint, now_ms));
        // The group is in the order in which its bodies came, the last one first.
        group[..=place.unwrap_or(GROUP - 1)].rotate_right(1);
        let seen = &mut group[0];
        let generation = place.map_or(1, |_| seen.generation_at(now_ms));
        if place.is_none() || generation > seen.generations {
            *seen = Seen {
                fingerprint: fingerprint.0,
                due_ms: now_ms.saturating_add(millis(delay.max(SHORTEST_ROUND))),
                generations: generation,
            };
        }
        generation
    }

    /// This body came back under the id that it was sent with: its ids are kept, so it does
    /// not loop.
    pub fn came_back(&mut self, fingerprint: Fingerprint) {
        let group = &mut self.groups[fingerprint.group()];
        for seen in group.iter_mut().flat_map(|group| group.iter_mut()) {
            if seen.fingerprint == fingerprint.0 {
                *seen = Seen::default();
            }
        }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DELAY: Duration = Duration::from_secs(2);

    fn at(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn print(body: &str) -> Fingerprint {
        Fingerprint::of(7, "q", body.as_bytes())
    }

    #[test]
    fn a_loop_is_one_generation_a_round_and_a_burst_is_one_in_all() {
        let mut watch = LoopWatch::default();
        for round in 1..=5 {
            let now = at(2.5 * f64::from(round));
            for _ in 0..300 {
                assert_eq!(watch.generation(print("a"), now), round);
                assert_eq!(watch.came_new(print("a"), now, DELAY), round);
            }
            // Stragglers of the burst come before the first of it was due.
            assert_eq!(watch.came_new(print("a"), now + at(1.9), DELAY), round);
        }
        assert_eq!(watch.came_new(print("b"), at(20.0), DELAY), 1);
    }

    #[test]
    fn without_a_delay_a_generation_still_lasts_a_second() {
        let mut watch = LoopWatch::default();
        let mut came = |seconds| watch.came_new(print("a"), at(seconds), Duration::ZERO);
        let generations = [came(0.0), came(0.5), came(0.999), came(1.0), came(1.9)];
        assert_eq!(generations, [1, 1, 1, 2, 2]);
    }

    #[test]
    fn what_stays_away_or_keeps_its_id_begins_anew() {
        let mut watch = LoopWatch::default();
        watch.came_new(print("a"), at(0.0), DELAY);
        let last = DELAY + WINDOW;
        assert_eq!(watch.generation(print("a"), last), 2);
        assert_eq!(watch.generation(print("a"), last + at(0.001)), 1);
        assert_eq!(watch.came_new(print("a"), last, DELAY), 2);
        watch.came_back(print("a"));
        assert_eq!(watch.came_new(print("a"), last + DELAY, DELAY), 1);
    }

    #[test]
    fn another_queue_or_body_is_another_message() {
        let of = |queue: &str, body: &[u8]| Fingerprint::of(7, queue, body);
        let one = of("q", b"body");
        assert_eq!(one, of("q", b"body"));
        assert_ne!(one, of("p", b"body"));
        assert_ne!(one, of("q", b"bodz"));
        assert_ne!(of("a", b"bc"), of("ab", b"c"));
        assert_ne!(one, Fingerprint::of(8, "q", b"body"));
        let long = vec![7; 100_000];
        let mut other = long.clone();
        other[77_777] = 8;
        assert_ne!(of("q", &long), of("q", &other));
    }

    #[test]
    fn what_came_last_the_longest_ago_is_forgotten_first() {
        let mut watch = LoopWatch::default();
        // All of one group: their last two bytes are the same.
        let nth = |n: u64| Fingerprint(n << 16);
        for n in 1..=8 {
            watch.came_new(nth(n), at(0.0), DELAY);
        }
        watch.came_new(nth(1), at(0.1), DELAY);
        watch.came_new(nth(9), at(0.2), DELAY);
        let known = |n| watch.generation(nth(n), at(3.0)) == 2;
        let forgotten: Vec<u64> = (1..=9).filter(|n| !known(*n)).collect();
        assert_eq!(forgotten, [2]);
    }

    #[test]
    fn a_loop_is_found_among_fifty_thousand_other_bodies_a_round() {
        let mut watch = LoopWatch::default();
        let mut others = 0u32;
        for round in 1..=4 {
            let now = at(2.5 * f64::from(round));
            assert_eq!(watch.came_new(print("loop"), now, DELAY), round);
            for _ in 0..50_000 {
                others += 1;
                watch.came_new(print(&others.to_string()), now, DELAY);
            }
        }
        assert!(std::mem::size_of_val(&*watch.groups) <= 3 << 20);
    }
}
