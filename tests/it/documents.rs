//! Documents that list the settings must agree with the code. `UPDATE_DOCS=1 cargo test
//! documents` rewrites them.

use std::{fs, path::PathBuf};

use retry_scheduler::config::{SETTINGS, Setting};

#[test]
fn env_example_is_the_list_of_settings() {
    let mut text = String::from(
        "# Every setting of retry-scheduler with its default.\n\
         #\n\
         # `docker compose` reads a copy of this file named .env. The same names in lower\n\
         # case are keys of the TOML file named by --config or CONFIG_FILE; the environment\n\
         # wins over the file.\n",
    );
    for Setting {
        name,
        default,
        help,
    } in SETTINGS
    {
        text.push_str(&format!("\n# {help}\n{name}={}\n", quoted(default)));
    }
    must_be(".env.example", |_| text.clone());
}

#[test]
fn the_readmes_table_is_the_list_of_settings() {
    const START: &str = "<!-- settings -->";
    const END: &str = "<!-- /settings -->";
    let mut table = String::from("| Setting | Default | What it does |\n|---|---|---|\n");
    for Setting {
        name,
        default,
        help,
    } in SETTINGS
    {
        let default = match *default {
            "" => "empty".to_owned(),
            default => format!("`{default}`"),
        };
        let help = help.replace('|', "\\|");
        table.push_str(&format!("| `{name}` | {default} | {help} |\n"));
    }
    must_be("README.md", |readme| {
        let (before, rest) = readme.split_once(START).expect("the start of the table");
        let (_, after) = rest.split_once(END).expect("the end of the table");
        format!("{before}{START}\n{table}{END}{after}")
    });
}

/// Quotes `value` so that both a shell and Compose read it back unchanged.
fn quoted(value: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:@,+%=".contains(c);
    if value.chars().all(plain) {
        value.to_owned()
    } else {
        assert!(!value.contains('\''), "{value} cannot be quoted simply");
        format!("'{value}'")
    }
}

/// Fails unless the content of a file is what `right` makes of it. With `UPDATE_DOCS` set,
/// writes that content instead.
fn must_be(name: &str, right: impl Fn(&str) -> String) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(name);
    let found = fs::read_to_string(&path).unwrap_or_default();
    let wanted = right(&found);
    if found == wanted {
        return;
    }
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, wanted).expect("the document is written");
        return;
    }
    panic!(
        "{name} should read as follows; UPDATE_DOCS=1 cargo test documents writes it\n\n{wanted}"
    );
}
