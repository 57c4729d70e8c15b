//! The delay: exponential, capped, then jittered.

use std::time::Duration;

use super::{Jitter, Policy};

impl Policy {
    /// The wait before the next retry, after `retries` have been made (0 before the first).
    ///
    /// `random` is uniform in 0..1; what lies outside is clamped and NaN counts as 0. Any `u32` and any policy give
    /// an answer: a power beyond `f64` is simply beyond `max_delay`.
    pub fn delay(&self, retries: u32, random: f64) -> Duration {
        let random = if random.is_nan() {
            0.0
        } else {
            random.clamp(0.0, 1.0)
        };
        let delay = self.capped_delay(retries);
        // From -1 to 1, for the kinds of jitter that go both ways.
        let swing = 2.0 * random - 1.0;
        match self.jitter {
            Jitter::None => delay,
            // The jitter is added after the cap: at the cap the most messages wait equally long, and they still have
            // to be spread.
            Jitter::Additive { up_to } => delay.saturating_add(scale(up_to, random)),
            Jitter::PlusMinus { by } if swing < 0.0 => delay.saturating_sub(scale(by, -swing)),
            Jitter::PlusMinus { by } => delay.saturating_add(scale(by, swing)),
            Jitter::Factor { by } => scale(delay, 1.0 + by * swing),
            Jitter::Full => scale(delay, random).min(delay),
        }
    }

    fn capped_delay(&self, retries: u32) -> Duration {
        // The growth is kept finite, so that a zero base stays zero: 0 × ∞ is not a number.
        let growth = self.multiplier.powf(f64::from(retries)).min(f64::MAX);
        Duration::try_from_secs_f64(self.base_delay.as_secs_f64() * growth)
            .unwrap_or(Duration::MAX)
            .min(self.max_delay)
    }
}

/// `Duration::mul_f64` without its panics: below zero is zero, too long is the longest there is.
fn scale(duration: Duration, by: f64) -> Duration {
    let seconds = (duration.as_secs_f64() * by).max(0.0);
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_zero_base_stays_zero_when_the_power_overflows() {
        let policy = Policy {
            base_delay: Duration::ZERO,
            jitter: Jitter::None,
            ..Policy::default()
        };
        assert_eq!(policy.delay(u32::MAX, 0.5), Duration::ZERO);
    }

    #[test]
    fn full_jitter_spreads_from_zero_to_the_delay() {
        let policy = Policy {
            jitter: Jitter::Full,
            ..Policy::default()
        };
        assert_eq!(policy.delay(1, 0.0), Duration::ZERO);
        assert_eq!(policy.delay(1, 0.5), seconds(2.0));
        assert_eq!(policy.delay(1, 1.0), seconds(4.0));
    }

    #[test]
    fn a_swing_wider_than_the_delay_stops_at_zero() {
        let policy = Policy {
            jitter: Jitter::PlusMinus { by: seconds(30.0) },
            ..Policy::default()
        };
        assert_eq!(policy.delay(0, 0.0), Duration::ZERO);
        assert_eq!(policy.delay(0, 0.5), seconds(2.0));
        assert_eq!(policy.delay(0, 1.0), seconds(32.0));
    }

    #[test]
    fn a_random_number_out_of_range_is_clamped_and_nan_is_zero() {
        let policy = Policy::default();
        for low in [-1.0, f64::NEG_INFINITY, f64::NAN] {
            assert_eq!(policy.delay(0, low), seconds(2.0));
        }
        for high in [1.5, f64::INFINITY] {
            assert_eq!(policy.delay(0, high), seconds(3.0));
        }
    }

    fn duration(up_to_secs: u64) -> impl Strategy<Value = Duration> {
        (0..=up_to_secs, 0..1_000_000_000u32).prop_map(|(secs, nanos)| Duration::new(secs, nanos))
    }

    fn jitter() -> impl Strategy<Value = Jitter> {
        prop_oneof![
            Just(Jitter::None),
            Just(Jitter::Full),
            duration(100_000).prop_map(|up_to| Jitter::Additive { up_to }),
            duration(100_000).prop_map(|by| Jitter::PlusMinus { by }),
            (0.0..=1.0).prop_map(|by| Jitter::Factor { by }),
        ]
    }

    fn policy() -> impl Strategy<Value = Policy> {
        let multiplier = prop_oneof![1.0..=4.0, 1.0..=f64::MAX];
        (
            duration(100_000),
            duration(200_000_000),
            multiplier,
            jitter(),
        )
            .prop_map(|(base_delay, room, multiplier, jitter)| Policy {
                base_delay,
                max_delay: base_delay + room,
                multiplier,
                jitter,
                ..Policy::default()
            })
    }

    fn attempt() -> impl Strategy<Value = u32> {
        prop_oneof![0..40u32, any::<u32>(), Just(u32::MAX)]
    }

    fn random() -> impl Strategy<Value = f64> {
        let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 1.0];
        prop_oneof![4 => 0.0..1.0, 1 => any::<f64>(), 1 => prop::sample::select(odd.to_vec())]
    }

    proptest! {
        #[test]
        fn generated_policies_are_valid(policy in policy()) {
            prop_assert_eq!(policy.validate(), Ok(()));
        }

        #[test]
        fn delay_stays_within_the_bounds_of_its_jitter(
            policy in policy(), attempt in attempt(), random in random(),
        ) {
            let plain = Policy { jitter: Jitter::None, ..policy.clone() }.delay(attempt, random);
            prop_assert!(policy.base_delay.saturating_sub(rounding(plain)) <= plain);
            prop_assert!(plain <= policy.max_delay);

            let (low, high) = match policy.jitter {
                Jitter::None => (plain, plain),
                Jitter::Additive { up_to } => (plain, plain + up_to),
                Jitter::PlusMinus { by } => (plain.saturating_sub(by), plain + by),
                Jitter::Factor { by } => (plain.mul_f64(1.0 - by), plain.mul_f64(1.0 + by)),
                Jitter::Full => (Duration::ZERO, plain),
            };
            let delay = policy.delay(attempt, random);
            let slack = match policy.jitter {
                Jitter::None | Jitter::Full => Duration::ZERO,
                _ => rounding(high),
            };
            prop_assert!(low.saturating_sub(slack) <= delay, "{delay:?} under {low:?}");
            prop_assert!(delay <= high + slack, "{delay:?} over {high:?}");
        }

        #[test]
        fn additive_jitter_never_shortens_a_wait(
            policy in policy(), up_to in duration(100_000), attempt in attempt(), random in random(),
        ) {
            let plain = Policy { jitter: Jitter::None, ..policy.clone() };
            let jittered = Policy { jitter: Jitter::Additive { up_to }, ..policy };
            prop_assert!(jittered.delay(attempt, random) >= plain.delay(attempt, random));
        }

        #[test]
        fn delay_without_jitter_grows_to_the_cap_and_stays_there(
            policy in policy(), attempt in 0..u32::MAX,
        ) {
            let policy = Policy { jitter: Jitter::None, ..policy };
            let (this, next) = (policy.delay(attempt, 0.0), policy.delay(attempt + 1, 0.0));
            prop_assert!(this <= next);
            if this == policy.max_delay {
                prop_assert_eq!(next, policy.max_delay);
            }
        }

        #[test]
        fn delay_without_jitter_multiplies_below_the_cap(
            base in 1..1_000u64, multiplier in 1.1..4.0f64, attempt in 0..20u32,
        ) {
            let policy = Policy {
                base_delay: Duration::from_millis(base),
                multiplier,
                max_delay: Duration::from_secs(u64::MAX),
                jitter: Jitter::None,
                ..Policy::default()
            };
            let (this, next) = (policy.delay(attempt, 0.0), policy.delay(attempt + 1, 0.0));
            prop_assert!(this < next);
            prop_assert!(this.mul_f64(multiplier).abs_diff(next) <= rounding(next) * 8);
        }

        #[test]
        fn delay_answers_for_any_attempt_any_random_and_even_an_invalid_policy(
            attempt in any::<u32>(), random in any::<f64>(), multiplier in any::<f64>(), factor in any::<f64>(),
            base in any::<u64>(), cap in any::<u64>(), kind in 0..5,
        ) {
            let longest = Duration::from_secs(base);
            let policy = Policy {
                base_delay: longest,
                max_delay: Duration::from_secs(cap),
                multiplier,
                jitter: match kind {
                    0 => Jitter::None,
                    1 => Jitter::Additive { up_to: longest },
                    2 => Jitter::PlusMinus { by: longest },
                    3 => Jitter::Factor { by: factor },
                    _ => Jitter::Full,
                },
                ..Policy::default()
            };
            policy.delay(attempt, random);
        }
    }

    /// What `f64` seconds cannot tell apart at this length, and a nanosecond of rounding at each end.
    fn rounding(at: Duration) -> Duration {
        Duration::from_nanos(2) + at.mul_f64(4.0 * f64::EPSILON)
    }
}
