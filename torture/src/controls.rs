//! `--controls`: short campaigns with a known bug each. "lost 0" means something only if the campaign is known
//! to notice a loss, so each of these must fail, and for the right reason.

use std::process::Stdio;

use futures::{StreamExt, stream};
use retry_scheduler::plant::Bug;
use tokio::process::Command;

/// How many campaigns run at once; each of them mostly waits.
const AT_ONCE: usize = 3;

/// Flags of all controls, which may be short because these bugs show at once.
const BRIEF: &str =
    "--seed 3 --instances 2 --messages 400 --kills 0 --faults 0 --seconds 6 --brief";

/// Bugs in the service, the flags of a campaign that shows them, and what that campaign must print.
const BUGS: [(Bug, &str, &str); 12] = [
    (
        Bug::AckBeforeCommit,
        "--faults 4 --only die-before-intake-commit",
        "lost: ",
    ),
    (
        Bug::TrustLostCommit,
        "--faults 16 --only pg-commit-unsent",
        "lost: ",
    ),
    (
        Bug::SettleUnconfirmed,
        "--faults 6 --only mq-publish-unsent",
        "lost: ",
    ),
    (
        Bug::IgnoreReturns,
        "--faults 3 --only target-gone",
        "lost: ",
    ),
    (Bug::ClaimWithoutLock, "--instances 3", " came twice "),
    (Bug::CountNotRaised, "", " came twice as retry 1 "),
    (Bug::BudgetIgnored, "", "over bound: "),
    (Bug::ReviewNotSent, "", "lost: "),
    (
        Bug::TxNotDetached,
        "--faults 1 --only pg-lock",
        "a failed transaction was kept open",
    ),
    (
        Bug::DueByOwnClock,
        "--faults 4 --only clock-skew",
        " too early",
    ),
    (
        Bug::FullWindowAtOnce,
        "--faults 1 --only crash-loop",
        "lost: ",
    ),
    (Bug::RepublishByName, "", "lost: "),
];

/// Flags of campaigns that do something wrong themselves, and what they must print.
const PLANTS: [(&str, &str); 9] = [
    ("--plant lose-rows", "lost: "),
    ("--plant settle-unsent", "lost: "),
    ("--plant steal", "lost: "),
    ("--plant copy", " came twice "),
    // These faults explain no duplicate, so it must be noticed in spite of them.
    (
        "--plant copy --faults 3 --only leave,mq-reject",
        " came twice ",
    ),
    ("--plant repeat", " was sent back 2 times for 1 failures"),
    ("--plant forget-counts", "one retry was settled twice"),
    ("--plant hurry", "was sent before it was due"),
    ("--plant forget-due", "retry_due is not what waits"),
];

/// Runs all controls, and returns whether all were caught.
pub async fn run() -> anyhow::Result<bool> {
    let bugs = BUGS.iter().map(|(bug, flags, notice)| {
        let name = format!("{bug:?}");
        Control {
            name: format!("{name} {flags}"),
            bug: Some(name),
            flags,
            notice,
        }
    });
    let plants = PLANTS.iter().map(|(flags, notice)| Control {
        name: (*flags).to_owned(),
        bug: None,
        flags,
        notice,
    });
    let controls: Vec<Control> = bugs.chain(plants).collect();
    let all = controls.len();
    let mut caught = 0;
    let mut running =
        stream::iter(controls.into_iter().map(Control::run)).buffer_unordered(AT_ONCE);
    while let Some(was_caught) = running.next().await {
        caught += usize::from(was_caught?);
    }
    println!("caught {caught} of {all}");
    Ok(caught == all)
}

struct Control {
    name: String,
    bug: Option<String>,
    flags: &'static str,
    /// A part of the line that the campaign prints when it has noticed.
    notice: &'static str,
}

impl Control {
    /// Runs a campaign as a process of its own, and returns whether it came to a bad verdict for the expected
    /// reason.
    async fn run(self) -> anyhow::Result<bool> {
        let mut campaign = Command::new(std::env::current_exe()?);
        campaign
            .args(BRIEF.split_whitespace())
            .args(self.flags.split_whitespace())
            .env_remove("RETRY_PLANT")
            .envs(self.bug.iter().map(|bug| ("RETRY_PLANT", bug)))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = campaign.output().await?;
        let said = String::from_utf8_lossy(&output.stdout);
        let last = said.lines().last().unwrap_or_default();
        let judged = output.status.code() == Some(1) && last.starts_with("attempted");
        let caught = judged && said.lines().any(|line| line.contains(self.notice));
        let word = if caught { "caught" } else { "MISSED" };
        let name = self.name.trim();
        println!("{word}  {name}: {last} ({})", output.status);
        if !caught {
            print!("{said}{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(caught)
    }
}
