# syntax=docker/dockerfile:1
ARG RUST_VERSION=1.95

FROM rust:${RUST_VERSION}-slim-bookworm AS build
WORKDIR /src

# Compile the dependencies in a layer of their own, with empty sources, so that they are compiled
# again only when a manifest or the lock file changes. The other members of the workspace are not
# built here, but cargo does not load the workspace without their manifests and sources.
COPY Cargo.toml Cargo.lock ./
COPY bench/Cargo.toml bench/
COPY devstack/Cargo.toml devstack/
COPY fuzz/Cargo.toml fuzz/
COPY testkit/Cargo.toml testkit/
COPY torture/Cargo.toml torture/
RUN mkdir src bench/src devstack/src fuzz/src testkit/src torture/src \
    && echo 'fn main() {}' > src/main.rs \
    && cp src/main.rs build.rs \
    && cp src/main.rs bench/src/main.rs \
    && cp src/main.rs torture/src/main.rs \
    && touch src/lib.rs devstack/src/lib.rs fuzz/src/lib.rs testkit/src/lib.rs \
    && cargo build --release --locked --bin retry-scheduler

# build.rs compiles proto/, and the binary contains the migrations and the policy presets. Copied
# files keep their times, which are older than the build of the empty sources; `touch` makes cargo
# see that they have changed.
COPY build.rs policies.toml ./
COPY proto proto
COPY migrations migrations
COPY src src
RUN touch build.rs src/main.rs src/lib.rs \
    && cargo build --release --locked --bin retry-scheduler

# Collect the files of the image: the binary, the libraries that it links, CA certificates and a
# user. There is no shell and no package manager.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN mkdir -p /image/usr/local/bin /image/etc/ssl/certs \
    && cp target/release/retry-scheduler /image/usr/local/bin/ \
    && ldd target/release/retry-scheduler | grep -o '/[^ ]*' \
        | xargs -I '{}' cp --dereference --parents '{}' /image \
    && cp /etc/ssl/certs/ca-certificates.crt /image/etc/ssl/certs/ \
    && echo 'nonroot:x:65532:65532::/:' > /image/etc/passwd

FROM scratch
LABEL org.opencontainers.image.title="retry-scheduler" \
      org.opencontainers.image.description="Durable retries for RabbitMQ: a failed message waits in Postgres and goes back to its queue, or to people." \
      org.opencontainers.image.licenses="MIT OR Apache-2.0"
COPY LICENSE-APACHE LICENSE-MIT /usr/share/doc/retry-scheduler/
COPY --from=build /image /
# The user `nonroot`, as a number, from which an orchestrator can tell that it is not root.
USER 65532:65532
EXPOSE 8086
STOPSIGNAL SIGTERM
# `probe` succeeds when Postgres answers, the consumers are subscribed and the publishers usable.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["/usr/local/bin/retry-scheduler", "probe"]
ENTRYPOINT ["/usr/local/bin/retry-scheduler"]
CMD ["serve"]
