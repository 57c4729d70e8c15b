//! Runs [`fuzz::json`] under libFuzzer.
#![cfg_attr(libfuzzer, no_main)]

#[cfg(libfuzzer)]
libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::json(bytes));

#[cfg(not(libfuzzer))]
fn main() {
    eprintln!("built without libFuzzer; run: cargo dev fuzz json");
}
