//! The API over HTTP/1.1: routes, limits, and errors in OpenAI's shape.

mod answer;
mod connection;
mod embedding;
mod reply;
mod room;

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request as HttpRequest, State};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::{StreamExt, stream};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::args::{Args, UnknownFields};
use crate::error::ApiError;
use crate::open::Opened;
use crate::request::embeddings::{self, EmbeddingRequest};
use crate::request::{self, Request};
use crate::tenants::{Tenant, Tenants};

use connection::Client;
pub use connection::serve;
use room::Hold;
pub use room::Room;

/// The page in the program itself.
const PAGE: &str = include_str!("../page.html");

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub struct Within {
    /// To send the head of a request; a connection may be idle for as long.
    pub head: Duration,
    /// To send a body.
    pub body: Duration,
}

impl Default for Within {
    fn default() -> Self {
        Self { head: Duration::from_secs(15), body: Duration::from_secs(30) }
    }
}

/// What a server needs to know to answer.
#[derive(Debug)]
pub struct App {
    /// The model and its engine.
    pub opened: Opened,
    /// Who may ask.
    pub tenants: Tenants,
    /// What clients call the model.
    pub name: String,
    /// The most tokens of an answer, if there is such a limit.
    pub max_tokens: Option<usize>,
    /// The longest body.
    pub max_body: usize,
    /// What requests may hold in memory.
    pub room: Room,
    /// The most open connections.
    pub connections: usize,
    /// After this an answer is given up.
    pub timeout: Duration,
    /// How long clients may take.
    pub within: Within,
    /// When the server was started, in seconds since 1970.
    pub created: u64,
    /// What becomes of requests with fields that nobody knows.
    pub unknown_fields: UnknownFields,
    /// Names by which the server may be reached without a token.
    pub hosts: Vec<String>,
    /// Origins whose pages may use the server; `*` is any.
    pub origins: Vec<HeaderValue>,
    /// Fields that the log has named.
    named: Mutex<HashSet<String>>,
}

type Shared = State<Arc<App>>;

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum_json(&self.body())).into_response();
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            headers
                .insert(header::RETRY_AFTER, HeaderValue::from(after.as_secs() + u64::from(after.subsec_nanos() > 0)));
        }
        if self.status == 401 {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// A body of JSON.
fn axum_json(value: &Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    let wrong_method =
        || async { ApiError::refused(405, "This method is not allowed for this path.").code("method_not_supported") };
    let nowhere = || async {
        ApiError::refused(
            404,
            "There is no such path: this server has /v1/chat/completions, /v1/completions, /v1/embeddings and /v1/models.",
        )
        .code("unknown_url")
    };
    let router = Router::new()
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(completions))
        .route("/v1/embeddings", post(embed))
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/health", get(health))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics))
        .route("/pages", get(pages))
        .route("/", get(page))
        .fallback(nowhere)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app.clone());
    // Without this, a preflight is what any request with an unknown method is.
    if app.origins.is_empty() { router } else { router.layer(cors(&app.origins)) }
}

/// Which pages of other origins browsers let use the server. They need a token all the same where there are tokens.
fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().cloned()),
    };
    CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        // Clients for browsers send headers of their own (`x-stainless-...`).
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER])
        .max_age(Duration::from_secs(3600))
}

impl App {
    /// What the command line says.
    pub fn new(args: &Args, opened: Opened, tenants: Tenants) -> Self {
        let room = Room::new(opened.room);
        let max_body = usize::try_from(args.max_body.get()).unwrap_or(usize::MAX);
        let of_file = || args.model.file_stem().map(|name| name.to_string_lossy().into_owned());
        Self {
            tenants: tenants.sharing(opened.engine.places()),
            opened,
            name: args.name.clone().or_else(of_file).unwrap_or_else(|| "model".into()),
            max_tokens: args.max_tokens,
            max_body: max_body.min(request::longest_body(room.staying_most())),
            room,
            connections: usize::from(args.connections).max(1),
            timeout: Duration::from_secs(args.timeout),
            within: Within::default(),
            created: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
            unknown_fields: args.unknown_fields,
            hosts: args.allow_host.clone(),
            origins: args.allow_origin.clone(),
            named: Mutex::default(),
        }
    }

    /// Who asks.
    fn tenant(&self, headers: &HeaderMap) -> Result<&Tenant, ApiError> {
        let tenant = self.tenants.find(headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes))?;
        if !self.tenants.have_tokens() {
            check_host(headers, &self.hosts)?;
        }
        Ok(tenant)
    }

    /// Refuses fields that nobody knows, or names each once in the log.
    fn check_unknown(&self, unknown: &[String]) -> Result<(), ApiError> {
        let Some(first) = unknown.first() else { return Ok(()) };
        if self.unknown_fields == UnknownFields::Refuse {
            return Err(request::unknown(first));
        }
        for field in unknown {
            let name = without_places(field);
            let mut named = self.named.lock();
            if named.len() < NAMED_MOST && named.insert(name) {
                tracing::warn!(field, "a request has a field that has no effect here (--unknown-fields)");
            }
        }
        Ok(())
    }
}

impl App {
    /// Refuses whoever may not read what all tenants do.
    fn operator(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let tenant = self.tenant(headers)?;
        if self.tenants.are_read_by(tenant) {
            return Ok(());
        }
        let message = "This token may not read what all tenants do. In the tenants file, \"operator\": true allows it.";
        Err(ApiError::refused(403, message))
    }
}

/// The most names of unknown fields that the log has.
const NAMED_MOST: usize = 256;

/// What is logged for a request that nobody waited for to the end, as some servers do.
const LEFT: u16 = 499;

/// Logs a request, and counts it, when its answer has been sent or its client has gone.
struct Logged {
    app: Arc<App>,
    path: &'static str,
    tenant: String,
    since: Instant,
    status: u16,
}

impl Logged {
    fn sent(&mut self, status: u16) {
        self.status = status;
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let Self { path, tenant, status, .. } = self;
        self.app.opened.metrics.answered(path, *status);
        tracing::info!(path, tenant, status, took = ?self.since.elapsed(), "answered");
    }
}

/// A field's name without the numbers in brackets: the nth message has the same fields as the first.
fn without_places(field: &str) -> String {
    let mut parts = field.split('[');
    let mut name = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        name.push('[');
        name += part.trim_start_matches(|c: char| c.is_ascii_digit());
    }
    name
}

/// Without a token, a page that a browser has open elsewhere must not reach the server by another name for this
/// machine.
fn check_host(headers: &HeaderMap, allowed: &[String]) -> Result<(), ApiError> {
    let is_allowed = |host: &HeaderValue| {
        let authority = Authority::try_from(host.as_bytes()).ok();
        authority.is_some_and(|authority| {
            let name = authority.host();
            // Nothing in front of the name, such as a user, and nothing behind it but a port.
            let port = authority.as_str().strip_prefix(name).filter(|rest| {
                rest.is_empty() || rest.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok())
            });
            let address = name.strip_prefix('[').and_then(|v6| v6.strip_suffix(']')).unwrap_or(name);
            let loopback = address.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
            let is_named = allowed.iter().any(|allowed| name.eq_ignore_ascii_case(allowed));
            port.is_some() && (loopback || is_named || name.eq_ignore_ascii_case("localhost"))
        })
    };
    if headers.get_all(header::HOST).iter().all(is_allowed) {
        return Ok(());
    }
    let message =
        "Without a token, this server answers only as localhost, a loopback address, or a name of --allow-host.";
    Err(ApiError::refused(403, message))
}

/// The body, if it is JSON and not too long, and comes in time. It holds what parsing it will take.
async fn body(app: &App, request: HttpRequest) -> Result<(Vec<u8>, Hold), ApiError> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim();
    if !kind.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::refused(415, "The body has to be JSON: send the header Content-Type: application/json."));
    }
    let too_long = || {
        let message = format!("The body is longer than {} bytes, the most that this server takes.", app.max_body);
        ApiError::refused(413, message).code("request_too_large")
    };
    let length = request.headers().get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    if length.is_some_and(|length: u64| length > app.max_body as u64) {
        return Err(too_long());
    }
    let read = async {
        let (mut body, mut whole, mut hold) = (request.into_body(), Vec::new(), app.room.staying());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| ApiError::invalid("The body ended before it was whole."))?;
            let Ok(more) = frame.into_data() else { continue };
            if whole.len() + more.len() > app.max_body {
                return Err(too_long());
            }
            hold.set(request::bytes_to_parse(whole.len() + more.len()))?;
            whole.extend_from_slice(&more);
        }
        whole.shrink_to_fit();
        Ok((whole, hold))
    };
    tokio::time::timeout(app.within.body, read).await.unwrap_or_else(|_| {
        let message = format!("The body did not come within {} s.", app.within.body.as_secs_f64());
        Err(ApiError::refused(408, message))
    })
}

/// What a body is parsed into.
trait Parsed {
    /// Fields that nobody knows.
    fn unknown(&self) -> &[String];

    /// Bytes of memory that it takes.
    fn bytes(&self) -> usize;
}

impl Parsed for Request {
    fn unknown(&self) -> &[String] {
        &self.common.unknown
    }

    fn bytes(&self) -> usize {
        self.bytes()
    }
}

impl Parsed for EmbeddingRequest {
    fn unknown(&self) -> &[String] {
        &self.unknown
    }

    fn bytes(&self) -> usize {
        self.bytes()
    }
}

/// Answers a request whose body is parsed by `parse`, by what `answer` makes of it.
async fn create<R: Parsed, F: Future<Output = Result<Response, ApiError>>>(
    app: Arc<App>,
    http: HttpRequest,
    path: &'static str,
    parse: fn(&[u8]) -> Result<R, ApiError>,
    answer: fn(Arc<App>, Tenant, R, Hold, Instant) -> F,
) -> Response {
    let since = Instant::now();
    let client = http.extensions().get::<Client>().cloned();
    let mut logged = Logged { app: app.clone(), path, tenant: String::new(), since, status: LEFT };
    let answering = async {
        let tenant = app.tenant(http.headers())?.clone();
        logged.tenant.clone_from(&tenant.name);
        let (body, mut hold) = body(&app, http).await?;
        let request = parse(&body)?;
        app.check_unknown(request.unknown())?;
        drop(body);
        hold.set(request.bytes())?;
        let gone = async {
            match client {
                Some(client) => client.gone().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            answered = answer(app.clone(), tenant, request, hold, since) => answered,
            () = gone => Err(ApiError::refused(LEFT, "The client has gone.")),
        }
    };
    let (parts, body) = answering.await.unwrap_or_else(IntoResponse::into_response).into_parts();
    let status = parts.status.as_u16();
    if body.size_hint().exact().is_some() {
        logged.sent(status);
        return Response::from_parts(parts, body);
    }
    // A client that goes before the end of a stream has not waited for its answer.
    let sent = stream::unfold((body.into_data_stream(), logged), move |(mut data, mut logged)| async move {
        match data.next().await {
            Some(piece) => Some((piece, (data, logged))),
            None => {
                logged.sent(status);
                None
            }
        }
    });
    Response::from_parts(parts, Body::from_stream(sent))
}

async fn chat_completions(State(app): Shared, http: HttpRequest) -> Response {
    create(app, http, "/v1/chat/completions", request::chat, answer::answer).await
}

async fn completions(State(app): Shared, http: HttpRequest) -> Response {
    create(app, http, "/v1/completions", request::completion, answer::answer).await
}

async fn embed(State(app): Shared, http: HttpRequest) -> Response {
    create(app, http, "/v1/embeddings", embeddings::embedding, embedding::answer).await
}

fn model_object(app: &App) -> Value {
    json!({
        "id": app.name,
        "object": "model",
        "created": app.created,
        "owned_by": "outcore",
        "context_window": app.opened.context,
    })
}

async fn models(State(app): Shared, headers: HeaderMap) -> Result<Response, ApiError> {
    app.tenant(&headers)?;
    Ok(axum_json(&json!({ "object": "list", "data": [model_object(&app)] })))
}

async fn model(
    State(app): Shared,
    name: Result<Path<String>, PathRejection>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    app.tenant(&headers)?;
    // A name that is no UTF-8 is none that there is.
    check_model(&app, &name.map(|Path(name)| name).unwrap_or_default())?;
    Ok(axum_json(&model_object(&app)))
}

fn check_model(app: &App, name: &str) -> Result<(), ApiError> {
    if name == app.name {
        return Ok(());
    }
    let name = crate::error::shortened(name);
    let message = format!("The model '{name}' does not exist or you do not have access to it: this is '{}'.", app.name);
    Err(ApiError::refused(404, message).param("model").code("model_not_found"))
}

/// Whether the process lives.
async fn health() -> Response {
    axum_json(&json!({ "status": "ok" }))
}

/// Whether requests are answered.
async fn ready(State(app): Shared) -> Result<Response, ApiError> {
    match app.opened.engine.why_not_ready() {
        None => Ok(axum_json(&json!({ "status": "ok" }))),
        Some(why) => Err(ApiError::unavailable(why, None)),
    }
}

async fn metrics(State(app): Shared, headers: HeaderMap) -> Result<Response, ApiError> {
    app.operator(&headers)?;
    let accepted = headers.get(header::ACCEPT).and_then(|accepted| accepted.to_str().ok()).unwrap_or_default();
    if accepted.contains("text/plain") && !accepted.contains("openmetrics") {
        let text = blocking(move || app.opened.metrics.plain_text()).await?;
        return Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response());
    }
    let text = blocking(move || app.opened.metrics.text()).await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// Where pages are, for the page: for each class a letter a page (`d`, `h` and `s` for device, host and disk).
async fn pages(State(app): Shared, headers: HeaderMap) -> Result<Response, ApiError> {
    app.operator(&headers)?;
    let places = app.opened.places.clone();
    let pages = blocking(move || {
        places.pages().map(|(class, tiers)| {
            let letters: String = tiers.into_iter().map(|tier| ["d", "h", "s"][tier as usize]).collect();
            json!({ "class": class, "pages": letters })
        })
    });
    let page = app.opened.places.pool().layout().page_size().bytes();
    Ok(axum_json(&json!({ "page_bytes": page, "classes": pages.await? })))
}

/// Work that may take a moment, on a thread that nobody else waits for.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal("The work on this request failed."))
}

async fn page(method: Method) -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (
            header::CONTENT_SECURITY_POLICY,
            "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
             img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
        ),
    ];
    let body = if method == Method::HEAD { Body::empty() } else { Body::from(PAGE) };
    (headers, body).into_response()
}

#[cfg(test)]
mod tests {
    use super::without_places;

    #[test]
    fn places_in_lists_are_left_out_of_names_and_other_digits_stay() {
        let names = ["messages[12].wings2[3].x", "a1", "a[b1]", "[", ""].map(without_places);
        assert_eq!(names, ["messages[].wings2[].x", "a1", "a[b1]", "[", ""]);
    }
}
