//! Builds the service as another revision has it, or as this tree would be with more migrations.
//!
//! Whatever is to be built is a tree of git. Its sources are written to target/upgrade/source,
//! always the same place, so that cargo compiles only what differs from the tree before. The binary
//! is kept under the id of its tree, and built once.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use devstack::{Foreground, Lock};

use crate::interrupts::Interrupts;
use crate::workspace::Workspace;

/// Where the migrations are in every tree.
const MIGRATIONS: &str = "migrations";

/// The name of the service's binary.
const SERVICE: &str = "retry-scheduler";

pub(crate) struct Versions<'a> {
    workspace: &'a Workspace,
    interrupts: &'a Interrupts,
    /// target/upgrade.
    directory: PathBuf,
    /// Held from the first build to the end of what runs the binaries: another one would write to the
    /// same sources, and remove the binaries that it does not need.
    lock: Lock,
}

impl<'a> Versions<'a> {
    pub(crate) fn new(workspace: &'a Workspace, interrupts: &'a Interrupts) -> Result<Self> {
        let directory = workspace.root().join("target/upgrade");
        fs::create_dir_all(&directory)
            .with_context(|| format!("Failed to create {}", directory.display()))?;
        let lock = Lock::acquire(&directory.join("lock"), "target/upgrade")?;
        Ok(Self {
            workspace,
            interrupts,
            directory,
            lock,
        })
    }

    /// The tree of a revision, and the revision's id as people write it.
    pub(crate) fn of_revision(&self, revision: &str) -> Result<(String, String)> {
        let parse = |more: &[&str], what: &str| {
            let mut git = self.git(&["rev-parse", "--verify", "--quiet"]);
            let found = said(git.args(more).arg(format!("{revision}^{{{what}}}")));
            found.with_context(|| format!("git knows no revision {revision:?}"))
        };
        Ok((parse(&[], "tree")?, parse(&["--short"], "commit")?))
    }

    /// The tree of this checkout as its files are now, committed or not, with more migrations.
    pub(crate) fn of_checkout(&self, migrations: &[PathBuf]) -> Result<String> {
        // An index of our own, so that the user's stays as it is.
        let index = self.directory.join("index");
        let git = |args: &[&str]| {
            let mut git = self.git(args);
            git.env("GIT_INDEX_FILE", &index);
            git
        };
        said(&mut git(&["read-tree", "HEAD"]))?;
        said(&mut git(&["add", "--all"]))?;
        let known = fs::read_dir(self.workspace.root().join(MIGRATIONS))?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect::<Result<Vec<_>>>()?;
        let names = migrations.iter().map(|path| {
            let name = path.file_name().and_then(OsStr::to_str);
            name.with_context(|| format!("{} is no file of SQL", path.display()))
        });
        let names = names.collect::<Result<Vec<_>>>()?;
        follow(&known, &names)?;
        for (path, name) in migrations.iter().zip(names) {
            // A relative path is the user's, and git runs in the root.
            let path = env::current_dir()?.join(path);
            let blob = said(git(&["hash-object", "-w", "--"]).arg(path))?;
            let entry = format!("100644,{blob},{MIGRATIONS}/{name}");
            said(&mut git(&["update-index", "--add", "--cacheinfo", &entry]))?;
        }
        said(&mut git(&["write-tree"]))
    }

    /// The service's binary of this tree, which is built unless it is there. `None` if it does not
    /// build, which cargo has then explained.
    pub(crate) fn build(&self, tree: &str, title: &str) -> Result<Option<PathBuf>> {
        let binary = self.directory.join(format!("{SERVICE}-{tree}"));
        if binary.is_file() {
            return Ok(Some(binary));
        }
        eprintln!("devstack: building {title}");
        let source = self.directory.join("source");
        self.write_out(tree, &source)?;
        // The features are those of a release: what the instances are told by their surroundings
        // and by signals is all that an upgrade needs.
        let target = self.directory.join("build");
        let mut build = self.workspace.cargo(&["build", "--quiet", "--locked"]);
        build.args(["--package", SERVICE, "--bin", SERVICE]);
        build.arg("--target-dir").arg(&target);
        build.current_dir(&source);
        let mut build = Foreground::start(&mut build, Some(&self.lock))?;
        if !self.interrupts.wait(&mut build, || {})?.success() {
            return Ok(None);
        }
        // The binary appears complete or not at all, also if this is interrupted.
        let draft = binary.with_extension("draft");
        fs::copy(target.join("debug").join(SERVICE), &draft)?;
        fs::rename(&draft, &binary)?;
        Ok(Some(binary))
    }

    /// Removes the binaries of all trees but these. Every change of a file makes another tree, and
    /// the binaries are large.
    pub(crate) fn keep(&self, binaries: [&Path; 2]) -> Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with(SERVICE) && !binaries.contains(&path.as_path()) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Makes `source` contain the files of a tree and no others.
    fn write_out(&self, tree: &str, source: &Path) -> Result<()> {
        if source.exists() {
            fs::remove_dir_all(source)?;
        }
        fs::create_dir_all(source)?;
        let archive = self.git(&["archive", tree]).stdout(Stdio::piped()).spawn();
        let mut archive = archive.context("Failed to run git")?;
        let files = archive.stdout.take().context("git writes no archive")?;
        // cargo compiles what is younger than its last build, so the files must not have the time of
        // their commit.
        let mut tar = Command::new("tar");
        tar.args(["--extract", "--touch", "--directory"])
            .arg(source);
        let written = tar.stdin(files).status().context("Failed to run tar")?;
        ensure!(
            archive.wait()?.success() && written.success(),
            "Failed to write out {tree}"
        );
        Ok(())
    }

    fn git(&self, args: &[&str]) -> Command {
        let mut git = Command::new("git");
        git.current_dir(self.workspace.root()).args(args);
        git
    }
}

/// What a command prints, without the end of its line.
fn said(command: &mut Command) -> Result<String> {
    let output = command.output();
    let output = output.with_context(|| format!("Failed to run {command:?}"))?;
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Fails unless these names are names of migrations that come after all that are known.
fn follow(known: &[String], names: &[&str]) -> Result<()> {
    let last = known.iter().filter_map(|name| number(name)).max();
    let mut taken = BTreeMap::new();
    for name in names {
        let number = number(name).with_context(|| {
            format!("{name}: the name of a migration is a number, an underscore, words and .sql")
        })?;
        if let Some(last) = last.filter(|last| *last >= number) {
            bail!(
                "{name} must have a higher number than {last}, which a migration of the tree has"
            );
        }
        if let Some(other) = taken.insert(number, name) {
            bail!("{other} and {name} have the same number");
        }
    }
    Ok(())
}

/// The number that a migration's name begins with, if it is the name of one.
fn number(name: &str) -> Option<u64> {
    let (number, words) = name.strip_suffix(".sql")?.split_once('_')?;
    let number = number.parse().ok()?;
    (!words.is_empty()).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_migration_for_the_purpose_comes_after_those_of_the_tree() {
        let known = ["0001_a_table.sql", "0006_a_place.sql", "README.md"].map(str::to_owned);
        let refused = |names: &[&str]| follow(&known, names).expect_err("refused").to_string();
        follow(&known, &[]).expect("none is fine");
        follow(&known, &["9000_a_column.sql", "7_another.sql"]).expect("both are later");
        assert!(refused(&["0006_again.sql"]).contains("higher number than 6"));
        assert!(refused(&["9000_a.sql", "9000_b.sql"]).contains("the same number"));
        for name in ["a_column.sql", "9000.sql", "9000_.sql", "9000_a_column.txt"] {
            assert!(refused(&[name]).starts_with(name), "{name}");
        }
    }
}
