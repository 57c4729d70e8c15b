//! See the function that it calls.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzz::json(bytes));
