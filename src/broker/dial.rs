//! A plain or encrypted stream to a host, for what the AMQP client does not do.

use std::{io, sync::Arc};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, RootCertStore, crypto::ring, pki_types::ServerName},
};

/// What can be read and written, whichever way it goes.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Connects, with TLS if `encrypted`. Certificates are checked against those that the machine
/// trusts. There is no deadline: the caller has one.
pub(super) async fn dial(host: &str, port: u16, encrypted: bool) -> io::Result<Box<dyn Stream>> {
    // A URL writes an IPv6 address in brackets, which are no part of it.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let stream = TcpStream::connect((host, port)).await?;
    if !encrypted {
        return Ok(Box::new(stream));
    }
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream);
    Ok(Box::new(stream.await?))
}
