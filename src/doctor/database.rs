//! Judges a Postgres server by what it says of itself. Pure.

use std::time::Duration;

use super::finding::{Finding, Grade};
use crate::store::inspect::DatabaseFacts;

/// The settings that matter here.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub pool_size: u32,
    pub migrate_on_start: bool,
    /// The port that we connect to.
    pub port: u16,
}

/// The oldest version that has all that our statements need.
const LEAST_VERSION: i32 = 130_000;

/// A difference of clocks that is worth a word. What is due is decided by Postgres's clock alone.
pub(super) const CLOCKS_APART: Duration = Duration::from_secs(5);

/// A transaction older than this keeps dead rows from being removed, and the tables grow.
const LONG: f64 = 3600.0;

pub(super) fn judge(facts: &DatabaseFacts, wanted: Wanted) -> Vec<Finding> {
    let server = &facts.server;
    let mut findings = Vec::new();
    let mut say = |grade, fact: String, cure: String| {
        findings.push(Finding::new(grade, "Postgres", fact, cure));
    };
    use Grade::{Problem, Unknown, Warning};

    if server.version_num < LEAST_VERSION {
        say(
            Problem,
            format!("version {}: it cannot store a failure", server.version),
            "use Postgres 13 or later".into(),
        );
    }
    if server.in_recovery {
        say(
            Problem,
            "is a standby, and read-only".into(),
            "let DATABASE_URL name the primary".into(),
        );
    } else if server.read_only {
        say(
            Problem,
            "is read-only for this user".into(),
            "set default_transaction_read_only = off for it".into(),
        );
    }
    if !server.fsync {
        say(
            Problem,
            "fsync is off: after a power cut acknowledged messages are gone, or the database is damaged".into(),
            "set fsync = on".into(),
        );
    }
    if !server.full_page_writes {
        say(
            Warning,
            "full_page_writes is off: after a power cut pages may be torn".into(),
            "set full_page_writes = on, unless the file system never tears a page".into(),
        );
    }
    let waits = !matches!(server.synchronous_commit.as_str(), "off" | "local");
    if !server.synchronous_standby_names.is_empty() && waits && server.synchronous_standbys == 0 {
        if server.hidden_standbys > 0 {
            say(
                Unknown,
                "has synchronous_standby_names, and does not tell this user whether one is connected".into(),
                "grant the user pg_monitor to have it told".into(),
            );
        } else {
            say(
                Problem,
                format!(
                    "no standby of synchronous_standby_names = {:?} is connected: every COMMIT waits",
                    server.synchronous_standby_names
                ),
                "start the standby, or set synchronous_standby_names = ''".into(),
            );
        }
    }
    judge_connections(facts, wanted, &mut say);
    judge_tables(facts, wanted, &mut say);
    let off_by = facts.clock_off_by();
    if off_by > CLOCKS_APART {
        let direction = if facts.clock_ahead > 0.0 {
            "ahead of"
        } else {
            "behind"
        };
        say(
            Warning,
            format!(
                "its clock is {} {direction} this machine's: what is due goes by it, log lines do not",
                whole(off_by)
            ),
            "run NTP on both".into(),
        );
    }
    let oldest = server.oldest_transaction.unwrap_or(0.0);
    let prepared = server.oldest_prepared.unwrap_or(0.0);
    if oldest.max(prepared) > LONG {
        let age = whole(Duration::from_secs_f64(oldest.max(prepared)));
        let (what, cure) = if prepared > oldest {
            ("prepared transaction", "end it: see pg_prepared_xacts")
        } else {
            ("transaction", "end it: see xact_start in pg_stat_activity")
        };
        say(
            Warning,
            format!(
                "a {what} has been open for {age}: until it ends, no dead row is removed and the tables grow"
            ),
            cure.into(),
        );
    }
    if findings.is_empty() {
        findings.push(Finding::ok("Postgres", describe(facts)));
    } else if findings.iter().all(|f| f.grade != Problem) {
        findings.insert(0, Finding::ok("Postgres", describe(facts)));
    }
    findings
}

fn judge_connections(
    facts: &DatabaseFacts,
    wanted: Wanted,
    say: &mut impl FnMut(Grade, String, String),
) {
    let server = &facts.server;
    let mut free = server.connections - server.connections_used;
    let mut limit = "max_connections";
    // -1 is no limit.
    if server.database_limit >= 0 {
        let of_database = i64::from(server.database_limit - server.database_used);
        if of_database < free {
            (free, limit) = (of_database, "the database's CONNECTION LIMIT");
        }
    }
    if server.role_limit >= 0 && i64::from(server.role_limit) < free {
        (free, limit) = (server.role_limit.into(), "the user's CONNECTION LIMIT");
    }
    let needed = wanted.pool_size;
    if free < i64::from(needed) {
        say(
            Grade::Warning,
            format!(
                "{} connections are free, and an instance uses up to {needed}",
                free.max(0)
            ),
            format!("raise {limit}, or lower DATABASE_POOL_SIZE"),
        );
    }
    const MODE: &str = "it must keep prepared statements apart: PgBouncer 1.21 or later with \
                        max_prepared_statements above 0, or pool_mode = session";
    match (facts.pooled_by_transaction, server.port) {
        (Some(true), _) => say(
            Grade::Warning,
            "a pooler in transaction mode stands before it".into(),
            MODE.into(),
        ),
        (_, Some(port)) if port != i32::from(wanted.port) => say(
            Grade::Unknown,
            format!(
                "we connect to port {}, and it listens on {port}: something forwards, perhaps a pooler",
                wanted.port
            ),
            format!("if it is a pooler, {MODE}"),
        ),
        _ => {}
    }
}

fn judge_tables(
    facts: &DatabaseFacts,
    wanted: Wanted,
    say: &mut impl FnMut(Grade, String, String),
) {
    let server = &facts.server;
    let absent = facts.tables.iter().all(|table| !table.present);
    let missing = facts.migrations_missing;
    if missing > 0 {
        let what = if absent {
            "has none of our tables".to_owned()
        } else {
            format!("lacks {missing} of our migrations")
        };
        if !server.may_create {
            let schema = server.schema.as_deref().unwrap_or("public");
            say(
                Grade::Problem,
                format!("{what}, and this user may not create them"),
                format!("GRANT CREATE ON SCHEMA {schema} TO the user, or migrate as another"),
            );
        } else if wanted.migrate_on_start {
            say(
                Grade::Warning,
                what,
                "none needed: `serve` applies the migrations when it starts".into(),
            );
        } else {
            say(
                Grade::Problem,
                format!("{what}, and MIGRATE_ON_START is false"),
                "run `retry-scheduler migrate`".into(),
            );
        }
    } else if facts.migrations_unknown > 0 {
        say(
            Grade::Warning,
            format!(
                "has {} migrations of a newer version",
                facts.migrations_unknown
            ),
            "finish the rollout: let every instance be of that version".into(),
        );
    }
    let of = |wrong: fn(&crate::store::inspect::TableFacts) -> bool| {
        let names: Vec<&str> = facts
            .tables
            .iter()
            .filter(|table| table.present && wrong(table))
            .map(|table| table.name.as_str())
            .collect();
        (!names.is_empty()).then(|| names.join(", "))
    };
    if let Some(names) = of(|table| !table.writable) {
        say(
            Grade::Problem,
            format!("this user may not write to {names}"),
            format!("GRANT SELECT, INSERT, UPDATE, DELETE ON {names} TO the user"),
        );
    }
    if !server.autovacuum {
        say(
            Grade::Warning,
            "autovacuum is off: the tables grow, and get slower".into(),
            "set autovacuum = on".into(),
        );
    } else if let Some(names) = of(|table| table.autovacuum_off) {
        say(
            Grade::Warning,
            format!("autovacuum is off for {names}: the tables grow, and get slower"),
            "ALTER TABLE … RESET (autovacuum_enabled)".into(),
        );
    }
}

fn describe(facts: &DatabaseFacts) -> String {
    let server = &facts.server;
    let free = server.connections - server.connections_used;
    let mut text = format!("version {}, {free} connections free", server.version);
    if server.synchronous_commit == "off" {
        text.push_str("; synchronous_commit is off, and the service switches it on for itself");
    }
    text
}

/// A duration in whole seconds, for people.
fn whole(duration: Duration) -> String {
    humantime::format_duration(Duration::from_secs(duration.as_secs())).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::inspect::{ServerFacts, TableFacts};

    const WANTED: Wanted = Wanted {
        pool_size: 8,
        migrate_on_start: true,
        port: 5432,
    };

    fn sound() -> DatabaseFacts {
        let tables = ["retry_queue", "retry_history", "idempotency_keys"];
        DatabaseFacts {
            server: ServerFacts {
                version_num: 150_004,
                version: "15.4".into(),
                fsync: true,
                full_page_writes: true,
                autovacuum: true,
                synchronous_commit: "on".into(),
                connections: 97,
                connections_used: 5,
                database_limit: -1,
                role_limit: -1,
                schema: Some("public".into()),
                may_create: true,
                port: Some(5432),
                ..ServerFacts::default()
            },
            tables: tables
                .map(|name| TableFacts {
                    name: name.into(),
                    present: true,
                    writable: true,
                    autovacuum_off: false,
                })
                .into(),
            pooled_by_transaction: Some(false),
            ..DatabaseFacts::default()
        }
    }

    #[test]
    fn a_sound_server_is_ok_in_one_line() {
        let found = judge(&sound(), WANTED);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].grade, Grade::Ok);
    }

    #[test]
    fn each_fault_has_a_grade_and_a_line_that_names_it() {
        type Change = fn(&mut DatabaseFacts);
        let cases: &[(Grade, &str, Change)] = &[
            (Grade::Problem, "version 12", |f| {
                f.server.version_num = 120_009;
                f.server.version = "12.9".into();
            }),
            (Grade::Problem, "standby, and read-only", |f| {
                f.server.in_recovery = true;
            }),
            (Grade::Problem, "read-only", |f| f.server.read_only = true),
            (Grade::Problem, "fsync", |f| f.server.fsync = false),
            (Grade::Warning, "full_page_writes", |f| {
                f.server.full_page_writes = false;
            }),
            (Grade::Problem, "COMMIT waits", |f| {
                f.server.synchronous_standby_names = "s1".into();
            }),
            (Grade::Unknown, "does not tell", |f| {
                f.server.synchronous_standby_names = "s1".into();
                f.server.hidden_standbys = 1;
            }),
            (Grade::Warning, "2 connections are free", |f| {
                f.server.connections_used = 95;
            }),
            (Grade::Warning, "3 connections are free", |f| {
                f.server.database_limit = 5;
                f.server.database_used = 2;
            }),
            (Grade::Warning, "4 connections are free", |f| {
                f.server.role_limit = 4;
            }),
            (Grade::Warning, "transaction mode", |f| {
                f.pooled_by_transaction = Some(true);
            }),
            (Grade::Unknown, "listens on 6432", |f| {
                f.server.port = Some(6432);
            }),
            (Grade::Warning, "lacks 1", |f| f.migrations_missing = 1),
            (Grade::Problem, "may not create", |f| {
                f.migrations_missing = 1;
                f.server.may_create = false;
            }),
            (Grade::Warning, "newer version", |f| {
                f.migrations_unknown = 2
            }),
            (Grade::Problem, "may not write to retry_history", |f| {
                f.tables[1].writable = false;
            }),
            (Grade::Warning, "autovacuum is off for retry_queue", |f| {
                f.tables[0].autovacuum_off = true;
            }),
            (Grade::Warning, "autovacuum is off:", |f| {
                f.server.autovacuum = false;
            }),
            (Grade::Warning, "clock is 9s behind", |f| {
                f.clock_ahead = -9.5;
                f.clock_error = 0.1;
            }),
            (Grade::Warning, "open for 2h", |f| {
                f.server.oldest_transaction = Some(7200.0);
            }),
            (Grade::Warning, "prepared transaction", |f| {
                f.server.oldest_prepared = Some(7200.0);
            }),
        ];
        for (grade, text, change) in cases {
            let mut facts = sound();
            change(&mut facts);
            let found = judge(&facts, WANTED);
            let bad: Vec<_> = found.iter().filter(|f| f.grade != Grade::Ok).collect();
            assert_eq!(bad.len(), 1, "{text}: {found:?}");
            assert_eq!(bad[0].grade, *grade, "{found:?}");
            assert!(bad[0].fact.contains(text), "{text}: {found:?}");
            assert!(bad[0].cure.is_some());
        }
    }

    #[test]
    fn without_migrations_at_start_missing_tables_are_a_problem() {
        let mut facts = sound();
        facts.migrations_missing = 5;
        facts.tables.iter_mut().for_each(|t| t.present = false);
        let by_hand = Wanted {
            migrate_on_start: false,
            ..WANTED
        };
        assert_eq!(judge(&facts, by_hand)[0].grade, Grade::Problem);
        assert!(
            judge(&facts, WANTED)
                .iter()
                .all(|f| f.grade != Grade::Problem)
        );
    }

    #[test]
    fn synchronous_commit_off_is_told_and_no_fault() {
        let mut facts = sound();
        facts.server.synchronous_commit = "off".into();
        let found = judge(&facts, WANTED);
        assert_eq!(found.len(), 1);
        assert!(found[0].fact.contains("switches it on"), "{found:?}");
    }
}
