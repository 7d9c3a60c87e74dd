//! Address discovery: an endpoint learns its public address from its relay.
//!
//! The relay answers QUIC connections on the UDP port with the number of its TCP port, and tells each caller the
//! address that it sees (QUIC address discovery). A caller behind a router learns its public address so, and can be
//! reached there after hole punching. The relay proves that it knows the secret in its URL: its TLS key is an Ed25519
//! key derived from the secret, presented as a raw public key (RFC 7250).

use std::sync::Arc;

use iroh::tls::CaTlsConfig;
use iroh_relay::{RelayConfig, RelayMap, RelayQuicConfig};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, ServerName, SubjectPublicKeyInfoDer, UnixTime, alg_id};
use rustls::{CertificateError, DigitallySignedStruct, PeerIncompatible, SignatureScheme};

use crate::key::RelayUrl;

/// The context of this derivation, which keeps the key apart from every other use of the secret.
const CONTEXT: &str = "fusionllm relay 2026-11 address discovery";

/// The relays of an endpoint that uses the one at `url`.
pub(crate) fn relay_map(url: &RelayUrl) -> RelayMap {
    let quic = match (pinned_token(url), url.port()) {
        (Some(_), Some(port)) => Some(RelayQuicConfig::new(port)),
        // A relay of another make has its own certificate and iroh's port, or no address discovery at all.
        _ if url.is_https() => Some(RelayQuicConfig::default()),
        _ => None,
    };
    [RelayConfig::new(url.to_iroh(), quic)].into_iter().collect()
}

/// The check of the certificate of the relay at `url`.
pub(crate) fn tls(url: &RelayUrl) -> CaTlsConfig {
    let Some(token) = pinned_token(url) else { return CaTlsConfig::default() };
    let expected = public_key(&token);
    CaTlsConfig::custom_server_cert_verifier(Arc::new(move |provider| {
        Ok(Arc::new(Pinned { expected: expected.clone(), provider }) as Arc<dyn ServerCertVerifier>)
    }))
}

/// The secret of a relay of ours. The relay itself speaks HTTP without TLS.
fn pinned_token(url: &RelayUrl) -> Option<String> {
    url.token().filter(|_| !url.is_https())
}

fn seed(token: &str) -> [u8; 32] {
    blake3::derive_key(CONTEXT, token.as_bytes())
}

fn public_key(token: &str) -> SubjectPublicKeyInfoDer<'static> {
    let public = iroh::SecretKey::from_bytes(&seed(token)).public();
    rustls::sign::public_key_to_spki(&alg_id::ED25519, public.as_bytes())
}

/// The TLS configuration, with the derived key, that the relay with this secret shows its callers.
#[cfg(feature = "relay")]
pub(crate) fn server_config(token: &str) -> Result<rustls::ServerConfig, rustls::Error> {
    use rustls::crypto::ring;
    use rustls::pki_types::PrivatePkcs8KeyDer;
    use rustls::server::AlwaysResolvesServerRawPublicKeys;
    use rustls::sign::CertifiedKey;

    /// PKCS #8 (RFC 8410) up to an Ed25519 seed.
    const PKCS8: [u8; 16] = [0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    let key = ring::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from([&PKCS8[..], &seed(token)].concat()))?;
    let certificate = CertificateDer::from(public_key(token).to_vec());
    let resolver = AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(vec![certificate], key)));
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth();
    Ok(config.with_cert_resolver(Arc::new(resolver)))
}

/// Accepts one public key, whatever the server's name.
#[derive(Debug)]
struct Pinned {
    expected: SubjectPublicKeyInfoDer<'static>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Pinned {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match end_entity.as_ref() == self.expected.as_ref() {
            true => Ok(ServerCertVerified::assertion()),
            false => Err(rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer)),
        }
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::PeerIncompatible(PeerIncompatible::Tls12NotOffered))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(cert.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
