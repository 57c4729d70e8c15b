//! Which instance is replaced by which version, and in which order.

/// One of the two versions of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    Old,
    New,
}

impl Version {
    pub const BOTH: [Self; 2] = [Self::Old, Self::New];

    /// The word for it in the names of its instances, and for people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Old => "old",
            Self::New => "new",
        }
    }

    pub fn of_name(name: &str) -> Option<Self> {
        Self::BOTH.into_iter().find(|v| v.name() == name)
    }
}

/// How an instance ends that is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// SIGTERM, after which it stops cleanly.
    Leave,
    /// SIGKILL.
    Kill,
}

/// The instance in one slot makes room for one of another version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replacement {
    pub slot: usize,
    pub end: End,
    pub by: Version,
}

/// A time in which the instances stay as they are, after a replacement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    pub phase: &'static str,
    /// What it begins with. There is nothing to replace at the very beginning.
    pub replacement: Option<Replacement>,
    /// How many instances of the old and of the new version there are.
    pub old: usize,
    pub new: usize,
}

impl Stage {
    /// The versions that must be at work.
    pub fn versions(&self) -> impl Iterator<Item = Version> {
        let runs = move |version: &Version| match version {
            Version::Old => self.old > 0,
            Version::New => self.new > 0,
        };
        Version::BOTH.into_iter().filter(runs)
    }

    pub fn is_mixed(&self) -> bool {
        self.old > 0 && self.new > 0
    }

    pub fn instances(&self) -> String {
        let counts = [(self.old, Version::Old), (self.new, Version::New)];
        let words = counts.iter().filter(|(count, _)| *count > 0);
        let words: Vec<String> = words
            .map(|(count, version)| format!("{count} {}", version.name()))
            .collect();
        words.join(", ")
    }
}

/// The version that all instances have in the end of each leg, with the names of its two phases: while it takes over,
/// and when it is alone.
const LEGS: [(Version, &str, &str); 3] = [
    (Version::New, "rolling forward", "new alone"),
    (Version::Old, "rolling back", "old on the new tables"),
    (Version::New, "forward again", "new alone again"),
];

/// All stages of an upgrade, a rollback and the next upgrade. Every second instance that is replaced is killed.
pub fn plan(instances: usize) -> Vec<Stage> {
    let mut stages = vec![Stage {
        phase: "old alone",
        replacement: None,
        old: instances,
        new: 0,
    }];
    for (version, mixed, alone) in LEGS {
        for slot in 0..instances {
            let (of_it, others) = (slot + 1, instances - slot - 1);
            let (old, new) = match version {
                Version::Old => (of_it, others),
                Version::New => (others, of_it),
            };
            let end = match stages.len() % 2 {
                0 => End::Kill,
                _ => End::Leave,
            };
            stages.push(Stage {
                phase: if others > 0 { mixed } else { alone },
                replacement: Some(Replacement {
                    slot,
                    end,
                    by: version,
                }),
                old,
                new,
            });
        }
    }
    stages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_goes_forward_and_back_and_forward_one_instance_at_a_time() {
        let stages = plan(3);
        let new: Vec<usize> = stages.iter().map(|stage| stage.new).collect();
        assert_eq!(new, [0, 1, 2, 3, 2, 1, 0, 1, 2, 3]);
        assert!(stages.iter().all(|stage| stage.old + stage.new == 3));
        assert_eq!(stages[0].replacement, None);
        assert_eq!(stages[1].instances(), "2 old, 1 new");
        assert_eq!(stages[6].instances(), "3 old");
        let mixed = stages.iter().filter(|stage| stage.is_mixed());
        assert!(mixed.clone().all(|stage| stage.versions().count() == 2));
        assert_eq!(mixed.count(), 6);
    }

    #[test]
    fn each_replacement_puts_another_version_into_its_slot() {
        let mut slots = [Version::Old; 4];
        for stage in plan(4) {
            if let Some(Replacement { slot, by, .. }) = stage.replacement {
                assert_ne!(slots[slot], by);
                slots[slot] = by;
            }
            let new = slots.iter().filter(|version| **version == Version::New);
            assert_eq!(new.count(), stage.new);
        }
    }

    #[test]
    fn in_every_leg_some_instances_leave_and_some_are_killed() {
        for instances in 2..6 {
            let stages = plan(instances);
            for leg in stages[1..].chunks(instances) {
                let ends = |end| {
                    leg.iter()
                        .any(|s| s.replacement.is_some_and(|r| r.end == end))
                };
                assert!(ends(End::Leave) && ends(End::Kill), "{instances} instances");
            }
        }
    }
}
