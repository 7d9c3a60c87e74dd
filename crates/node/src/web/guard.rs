//! Who may see the page of a run.
//!
//! On loopback, everybody on this machine may. A page of a stranger in the same browser may not: it cannot read an
//! answer without the server's consent, which is never given, unless its name leads to this machine (DNS rebinding). Such
//! a request has the stranger's name in `Host`, so there only the names of this machine are served.
//!
//! At another address, a visitor has to know the token. There any `Host` will do. People come by names, forwarded ports
//! and proxies that nobody here can list, and rebinding gains nothing: a browser sends the cookie to the name that set it
//! alone, and a stranger's page does not know the token.

use std::net::SocketAddr;

use axum::http::header::{AUTHORIZATION, COOKIE, HOST, ORIGIN};
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderName, Method, StatusCode};
use fusionllm_transport::Secret;

use crate::relay::{parse, secret_text};

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Decides who is let in.
pub(super) struct Guard {
    /// The address that the server listens at.
    pub(super) addr: SocketAddr,
    /// The secret that a visitor has to know.
    pub(super) token: Option<Secret>,
}

/// A visitor that is let in.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Admitted {
    /// It gets what it asks for.
    Visitor,
    /// It has shown the token in the address. It gets this cookie, and is sent to the address without the token, which
    /// then stands in no history and on no screen.
    FirstVisit(String),
}

/// A visitor that is refused, and what it reads.
pub(super) type Refusal = (StatusCode, &'static str);

const NOT_READ: Refusal = (StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered here\n");
const NO_HOST: Refusal = (StatusCode::BAD_REQUEST, "a request names one host\n");
const OTHER_HOST: Refusal = (
    StatusCode::FORBIDDEN,
    "this page is served to its own machine alone: open it as 127.0.0.1 with the port that the run has printed, which \
     a tunnel has to use at your end, too\n",
);
const OTHER_SITE: Refusal = (StatusCode::FORBIDDEN, "pages of other sites may not read this\n");
const NO_TOKEN: Refusal =
    (StatusCode::UNAUTHORIZED, "open the address that the run has printed as a whole: it ends with a token\n");

impl Guard {
    pub(super) fn check(&self, request: &Parts) -> Result<Admitted, Refusal> {
        if request.method != Method::GET && request.method != Method::HEAD {
            return Err(NOT_READ);
        }
        let host = host(request).ok_or(NO_HOST)?;
        if self.token.is_none() && !self.is_own(&host) {
            return Err(OTHER_HOST);
        }
        if is_of_another_site(request, &host) {
            return Err(OTHER_SITE);
        }
        let Some(token) = &self.token else { return Ok(Admitted::Visitor) };
        if let Some(shown) = in_query(request) {
            let cookie = || format!("{}={}; HttpOnly; SameSite=Strict; Path=/", self.cookie(), secret_text(token));
            return if is(token, shown) { Ok(Admitted::FirstVisit(cookie())) } else { Err(NO_TOKEN) };
        }
        let shown = self.in_cookie(request).or_else(|| bearer(request));
        if shown.is_some_and(|shown| is(token, shown)) { Ok(Admitted::Visitor) } else { Err(NO_TOKEN) }
    }

    /// Whether these are a name and the port of this server on its own machine.
    fn is_own(&self, host: &Authority) -> bool {
        let name = host.host();
        let own = self.addr.ip().to_canonical().to_string();
        let is_name = ["localhost", "127.0.0.1", "[::1]", &own].iter().any(|own| name.eq_ignore_ascii_case(own));
        is_name && host.port_u16().unwrap_or(80) == self.addr.port()
    }

    /// The name of the cookie. A browser sends cookies to all ports of a host, so each run has a name of its own.
    fn cookie(&self) -> String {
        format!("fusionllm-{}", self.addr.port())
    }

    fn in_cookie<'r>(&self, request: &'r Parts) -> Option<&'r str> {
        let name = self.cookie();
        let cookies = request.headers.get_all(COOKIE).iter().filter_map(|cookies| cookies.to_str().ok());
        let mut pairs = cookies.flat_map(|cookies| cookies.split(';')).filter_map(|pair| pair.trim().split_once('='));
        pairs.find(|(of, _)| *of == name).map(|(_, value)| value)
    }
}

/// Whether a text is the token. The secrets are compared in constant time.
fn is(token: &Secret, shown: &str) -> bool {
    parse(shown).is_some_and(|shown| shown == *token)
}

/// The host that a request is for. Only a proxy is asked for a whole URL, and this is none.
fn host(request: &Parts) -> Option<Authority> {
    let mut hosts = request.headers.get_all(HOST).iter();
    let host = hosts.next().filter(|_| hosts.next().is_none() && request.uri.authority().is_none())?;
    let host = host.to_str().ok()?.parse::<Authority>().ok()?;
    (!host.as_str().contains('@')).then_some(host)
}

/// Whether a page of another site makes this request. Browsers say so. A link to the page may be anywhere, because who
/// follows it leaves the other site.
fn is_of_another_site(request: &Parts, host: &Authority) -> bool {
    let text = |name: &HeaderName| request.headers.get(name).map(|value| value.to_str().unwrap_or("?"));
    let is_foreign = |origin: &str| origin.split_once("://").is_none_or(|(_, of)| of != host.as_str());
    let is_visit = request.uri.path() == "/" && text(&FETCH_MODE) == Some("navigate");
    text(&ORIGIN).is_some_and(is_foreign)
        || (!is_visit && text(&FETCH_SITE).is_some_and(|site| site != "same-origin" && site != "none"))
}

/// The token in the address of a first visit.
fn in_query(request: &Parts) -> Option<&str> {
    let query = request.uri.query().filter(|_| request.uri.path() == "/")?;
    query.split('&').find_map(|pair| pair.strip_prefix("token="))
}

/// The token that Prometheus shows.
fn bearer(request: &Parts) -> Option<&str> {
    let (scheme, token) = request.headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    fn asks(guard: &Guard, path: &str, headers: &[(&str, &str)]) -> Result<Admitted, StatusCode> {
        let mut request = Request::get(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        guard.check(&request.body(()).unwrap().into_parts().0).map_err(|(status, _)| status)
    }

    #[test]
    fn only_names_of_this_machine_lead_to_a_page_on_loopback() {
        let guard = Guard { addr: ([127, 0, 0, 1], 8800).into(), token: None };
        for host in ["127.0.0.1:8800", "localhost:8800", "LOCALHOST:8800", "[::1]:8800"] {
            assert_eq!(asks(&guard, "/", &[("host", host)]), Ok(Admitted::Visitor), "{host}");
        }
        for host in
            ["evil.example:8800", "127.0.0.1", "127.0.0.1:8801", "localhost.evil.example:8800", "192.0.2.1:8800"]
        {
            assert_eq!(asks(&guard, "/", &[("host", host)]), Err(StatusCode::FORBIDDEN), "{host}");
        }
        for hosts in [&[][..], &[("host", "localhost:8800"), ("host", "x")], &[("host", "a@localhost:8800")]] {
            assert_eq!(asks(&guard, "/", hosts), Err(StatusCode::BAD_REQUEST), "{hosts:?}");
        }
        let guard = Guard { addr: ([127, 0, 0, 1], 80).into(), token: None };
        assert_eq!(asks(&guard, "/", &[("host", "localhost")]), Ok(Admitted::Visitor));
    }

    #[test]
    fn pages_of_other_sites_may_link_but_not_read() {
        let guard = Guard { addr: ([127, 0, 0, 1], 8800).into(), token: None };
        let asks = |path, name, value| asks(&guard, path, &[("host", "127.0.0.1:8800"), (name, value)]);
        for path in ["/", "/events", "/metrics"] {
            assert_eq!(asks(path, "origin", "http://127.0.0.1:8800"), Ok(Admitted::Visitor));
            assert_eq!(asks(path, "sec-fetch-site", "same-origin"), Ok(Admitted::Visitor));
            for origin in ["http://evil.example", "null", "http://127.0.0.1:9999"] {
                assert_eq!(asks(path, "origin", origin), Err(StatusCode::FORBIDDEN), "{path} {origin}");
            }
            for site in ["cross-site", "same-site"] {
                assert_eq!(asks(path, "sec-fetch-site", site), Err(StatusCode::FORBIDDEN), "{path} {site}");
            }
        }
        let link = [("host", "127.0.0.1:8800"), ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
        assert_eq!(super::tests::asks(&guard, "/", &link), Ok(Admitted::Visitor));
        assert_eq!(super::tests::asks(&guard, "/metrics", &link), Err(StatusCode::FORBIDDEN));
    }

    #[test]
    fn elsewhere_the_token_is_needed_and_any_host_will_do() {
        let token = Secret::from_bytes([7; 16]);
        let (right, wrong) = (secret_text(&token), secret_text(&Secret::from_bytes([8; 16])));
        let guard = Guard { addr: ([192, 0, 2, 1], 8800).into(), token: Some(token) };
        let asks = |path: &str, name, value: &str| asks(&guard, path, &[("host", "run.example:9000"), (name, value)]);
        let cookie = |token: &str| format!("a=b; fusionllm-8800={token}; c");
        for path in ["/", "/events", "/metrics"] {
            assert_eq!(asks(path, "cookie", &cookie(&right)), Ok(Admitted::Visitor));
            assert_eq!(asks(path, "authorization", &format!("Bearer {right}")), Ok(Admitted::Visitor));
            for wrong in [&wrong[..], "", "x", &right[1..]] {
                assert_eq!(asks(path, "cookie", &cookie(wrong)), Err(StatusCode::UNAUTHORIZED), "{wrong:?}");
                assert_eq!(asks(path, "authorization", &format!("Bearer {wrong}")), Err(StatusCode::UNAUTHORIZED));
            }
            assert_eq!(asks(path, "accept", "*/*"), Err(StatusCode::UNAUTHORIZED));
        }
        let cookie = format!("fusionllm-8800={right}; HttpOnly; SameSite=Strict; Path=/");
        assert_eq!(asks(&format!("/?token={right}"), "accept", "*/*"), Ok(Admitted::FirstVisit(cookie)));
        assert_eq!(asks(&format!("/?token={wrong}"), "accept", "*/*"), Err(StatusCode::UNAUTHORIZED));
        assert_eq!(asks(&format!("/metrics?token={right}"), "accept", "*/*"), Err(StatusCode::UNAUTHORIZED));
    }

    #[test]
    fn nothing_can_be_changed_here() {
        let guard = Guard { addr: ([127, 0, 0, 1], 8800).into(), token: None };
        let request = Request::post("/").header("host", "localhost:8800").body(()).unwrap();
        assert_eq!(guard.check(&request.into_parts().0), Err(NOT_READ));
    }
}
