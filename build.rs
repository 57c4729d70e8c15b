//! Compiles `proto/` without protoc, so that Rust is all a build needs.

use prost::Message;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    println!("cargo:rerun-if-changed=migrations");
    let descriptors = protox::compile(["proto/retry.proto"], ["proto"])?;
    prost_build::Config::new()
        .btree_map(["."])
        .compile_fds(descriptors.clone())?;
    pbjson_build::Builder::new()
        .register_descriptors(&descriptors.encode_to_vec())?
        .btree_map(["."])
        .ignore_unknown_fields()
        .build(&[".retry.v1"])?;

    Ok(())
}
