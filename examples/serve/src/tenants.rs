//! Who may ask, and for how much.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use outcore_kv::{TenantId, TenantOptions};
use parking_lot::Mutex;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};
use subtle::ConstantTimeEq;

use crate::error::{ApiError, shortened};

/// The shortest bearer token.
const TOKEN_LEAST: usize = 8;
/// The longest name of a tenant, in bytes.
const NAME_MOST: usize = 100;
/// The most tenants of a server.
const TENANTS_MOST: usize = 1024;

/// A tenant's limits.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its number in the pool.
    pub id: TenantId,
    /// What the tenant is called, for logs.
    pub name: String,
    token: Option<Vec<u8>>,
    /// Whether it may read what all tenants do.
    operator: bool,
    /// Answers at a time.
    concurrency: usize,
    /// Tokens a minute, of prompts and answers together.
    tokens_per_minute: Option<f64>,
    /// What it may have in the pool.
    pub options: TenantOptions,
    used: Arc<Mutex<Used>>,
}

/// What a tenant uses.
#[derive(Debug, Default)]
struct Used {
    answers: usize,
    /// Tokens that it may still use; less than none if more was taken than was left.
    left: f64,
    counted: Option<Instant>,
}

/// All tenants.
#[derive(Debug)]
pub struct Tenants(Vec<Tenant>);

/// Leave to write answers, until it is dropped.
#[derive(Debug)]
pub struct Leave {
    tenant: Tenant,
    answers: usize,
    /// Tokens that the answers may come to, with their prompts.
    taken: f64,
    used: f64,
}

impl Leave {
    /// Takes as many tokens as the answers may come to, with their prompts. What was not used comes back at the end.
    ///
    /// # Errors
    /// 429 if none are left.
    pub fn take(&mut self, tokens: usize, now: Instant) -> Result<(), ApiError> {
        let mut used = self.tenant.used.lock();
        self.tenant.check_rate(&mut used, now)?;
        used.left -= tokens as f64;
        self.taken += tokens as f64;
        Ok(())
    }

    /// So many of them were used.
    pub fn used(&mut self, tokens: usize) {
        self.used += tokens as f64;
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        let mut used = self.tenant.used.lock();
        used.answers -= self.answers;
        used.left += self.taken - self.used;
    }
}

impl Tenant {
    fn new(id: u64, name: String, token: Option<Vec<u8>>) -> Self {
        let (id, options) = (TenantId::new(id), TenantOptions::default());
        let (concurrency, tokens_per_minute) = (usize::MAX, None);
        Self { id, name, token, operator: false, concurrency, tokens_per_minute, options, used: Arc::default() }
    }

    /// Leave for so many answers at once.
    ///
    /// # Errors
    /// 429 beyond the tenant's limits: it says which, and when there will be room; 400 for more than it may ever have.
    pub fn enter(&self, answers: usize, now: Instant) -> Result<Leave, ApiError> {
        let mut used = self.used.lock();
        if answers > self.concurrency {
            let message =
                format!("{answers} answers are asked for, and this token may have {} at a time.", self.concurrency);
            return Err(ApiError::invalid(message).param("n").code("invalid_value"));
        }
        if used.answers + answers > self.concurrency {
            let message = format!(
                "Rate limit reached: {} answers are being written or wait, and this token may have {} at a time.",
                used.answers, self.concurrency
            );
            return Err(ApiError::too_many(message, Duration::from_secs(1)));
        }
        self.check_rate(&mut used, now)?;
        used.answers += answers;
        Ok(Leave { tenant: self.clone(), answers, taken: 0.0, used: 0.0 })
    }

    /// How many answers, up to `most`, [`enter`](Self::enter) admits now; at least one, which it may refuse.
    pub fn may_enter(&self, most: usize) -> usize {
        most.min(self.concurrency.saturating_sub(self.used.lock().answers)).max(1)
    }

    fn check_rate(&self, used: &mut Used, now: Instant) -> Result<(), ApiError> {
        let Some(rate) = self.tokens_per_minute else { return Ok(()) };
        used.refill(rate, now);
        if used.left > 0.0 {
            return Ok(());
        }
        let wait = Duration::from_secs_f64((1.0 - used.left) * 60.0 / rate);
        let message = format!(
            "Rate limit reached: this token may use {rate} tokens a minute. Try again in {} s.",
            wait.as_secs() + 1
        );
        Err(ApiError::too_many(message, wait))
    }
}

impl Used {
    fn refill(&mut self, rate: f64, now: Instant) {
        self.left = match self.counted {
            None => rate,
            Some(last) => (self.left + now.saturating_duration_since(last).as_secs_f64() * rate / 60.0).min(rate),
        };
        self.counted = Some(now);
    }
}

impl Tenants {
    /// One tenant; without a token, whoever reaches the server is that one.
    ///
    /// # Errors
    /// For a token that is too short.
    pub fn single(token: Option<&str>) -> Result<Self, String> {
        let token = token.map(check_token).transpose()?;
        Ok(Self(vec![Tenant::new(1, "default".into(), token)]))
    }

    /// Those of a file: `{"tenants": [{"name", "token", ...}]}`.
    ///
    /// # Errors
    /// Says which member of which tenant is wrong. Tokens are not repeated.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        Self::parse(&text).map_err(|why| format!("{}: {why}", path.display()))
    }

    /// Those of such a file's text.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = serde_json::from_str(text).map_err(|wrong| {
            // What the parser says may repeat a token.
            let why = match wrong.is_data() {
                true => "an object with an array \"tenants\" of objects is wanted, in which each member stands once",
                false => "no JSON",
            };
            format!("{why}: line {}, column {}", wrong.line(), wrong.column())
        })?;
        let all = file.tenants;
        if all.is_empty() || all.len() > TENANTS_MOST {
            return Err(format!("{} tenants, and there can be 1 to {TENANTS_MOST}", all.len()));
        }
        let mut names = HashMap::new();
        let mut tenants: Vec<Tenant> = Vec::new();
        for (nth, Members(fields)) in all.iter().enumerate() {
            let tenant = parse_tenant(nth, fields)?;
            if let Some(other) = names.insert(tenant.name.clone(), nth) {
                return Err(format!("tenants[{other}] and tenants[{nth}] have the same name"));
            }
            if let Some(other) = tenants.iter().position(|other| other.token == tenant.token) {
                return Err(format!("tenants[{other}] and tenants[{nth}] have the same token"));
            }
            tenants.push(tenant);
        }
        Ok(Self(tenants))
    }

    /// Where there are several, none may fill all the places of a server that writes and lets wait so many answers: a
    /// tenant whose file says nothing else may have three quarters of them.
    #[must_use]
    pub fn sharing(mut self, places: usize) -> Self {
        if self.0.len() > 1 {
            let most = (places / 4 * 3).max(1);
            self.0.iter_mut().filter(|tenant| tenant.concurrency == usize::MAX).for_each(|one| one.concurrency = most);
        }
        self
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &Tenant> {
        self.0.iter()
    }

    /// Whether this tenant may read what all do: the only one, and an operator.
    pub fn are_read_by(&self, tenant: &Tenant) -> bool {
        self.0.len() == 1 || tenant.operator
    }

    /// Whether a token is asked for.
    pub fn have_tokens(&self) -> bool {
        self.0.iter().any(|tenant| tenant.token.is_some())
    }

    /// The tenant with this value of the header `Authorization`. Takes as long for every value of the same length.
    ///
    /// # Errors
    /// 401.
    pub fn find(&self, authorization: Option<&[u8]>) -> Result<&Tenant, ApiError> {
        if let [one @ Tenant { token: None, .. }] = self.0.as_slice() {
            return Ok(one);
        }
        let Some(value) = authorization else {
            let message = "You didn't provide an API key. Send it in the header: Authorization: Bearer YOUR_KEY.";
            return Err(ApiError::token(message));
        };
        let scheme = value.get(..7).unwrap_or_default();
        let token = if scheme.eq_ignore_ascii_case(b"bearer ") { &value[7..] } else { &[] };
        let mut found = None;
        for tenant in &self.0 {
            let same = tenant.token.as_ref().is_some_and(|known| bool::from(known.as_slice().ct_eq(token)));
            found = if same { Some(tenant) } else { found };
        }
        found.ok_or_else(|| ApiError::token("Incorrect API key provided."))
    }
}

/// A file of tenants.
#[derive(serde::Deserialize)]
struct File {
    tenants: Vec<Members>,
}

/// The members of an object, each of which stands there once: of two, a reader might have meant either.
struct Members(Map<String, Value>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Each;

        impl<'de> Visitor<'de> for Each {
            type Value = Members;

            fn expecting(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                to.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Members, A::Error> {
                let mut members = Map::new();
                while let Some((name, value)) = from.next_entry::<String, Value>()? {
                    if members.insert(name, value).is_some() {
                        return Err(A::Error::custom("a member stands twice"));
                    }
                }
                Ok(Members(members))
            }
        }

        from.deserialize_map(Each)
    }
}

fn check_name(name: &str) -> Result<String, String> {
    // It is a label of metrics and a part of lines of the log.
    if name.is_empty() || name.len() > NAME_MOST || name.chars().any(char::is_control) {
        return Err(format!("a name has 1 to {NAME_MOST} bytes, and no control characters"));
    }
    Ok(name.to_owned())
}

fn check_token(token: &str) -> Result<Vec<u8>, String> {
    let fits = token.len() >= TOKEN_LEAST && token.bytes().all(|byte| byte.is_ascii_graphic());
    if fits {
        return Ok(token.as_bytes().to_vec());
    }
    Err(format!("a token has at least {TOKEN_LEAST} visible ASCII characters, without spaces"))
}

fn parse_tenant(nth: usize, fields: &Map<String, Value>) -> Result<Tenant, String> {
    let at = |name: &str| format!("tenants[{nth}].{name}");
    let text = |name: &str| {
        let text = fields.get(name).and_then(Value::as_str);
        text.ok_or_else(|| format!("{}: a string is wanted", at(name)))
    };
    let number = |name: &str, most: u64| match fields.get(name) {
        None => Ok(None),
        Some(value) => match value.as_u64().filter(|number| (1..=most).contains(number)) {
            None => Err(format!("{}: an integer from 1 to {most} is wanted", at(name))),
            number => Ok(number),
        },
    };
    let flag = |name: &str| match fields.get(name) {
        None => Ok(false),
        Some(value) => value.as_bool().ok_or_else(|| format!("{}: true or false is wanted", at(name))),
    };
    let known = [
        "name",
        "token",
        "operator",
        "concurrency",
        "tokens_per_minute",
        "blocks",
        "reserved_blocks",
        "weight",
        "shares",
    ];
    if let Some(other) = fields.keys().find(|name| !known.contains(&name.as_str())) {
        let other = shortened(other);
        return Err(format!("{}: there is no such member; there are {}", at(&other), known.join(", ")));
    }
    let token = check_token(text("token")?).map_err(|why| format!("{}: {why}", at("token")))?;
    let name = check_name(text("name")?).map_err(|why| format!("{}: {why}", at("name")))?;
    let mut tenant = Tenant::new(nth as u64 + 1, name, Some(token));
    tenant.operator = flag("operator")?;
    tenant.concurrency = number("concurrency", 1 << 20)?.map_or(usize::MAX, |most| most as usize);
    tenant.tokens_per_minute = number("tokens_per_minute", 1 << 40)?.map(|rate| rate as f64);
    let most = u64::from(u32::MAX);
    let options = &mut tenant.options;
    options.blocks_most = number("blocks", most)?.map_or(u32::MAX, |blocks| blocks as u32);
    options.active_reserved = number("reserved_blocks", most)?.map_or(0, |blocks| blocks as u32);
    options.active_weight = number("weight", most)?.map_or(1, |weight| weight as u32);
    options.shares = flag("shares")?;
    Ok(tenant)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    const TWO: &str = r#"{"tenants": [
        {"name": "a", "token": "aaaaaaaa", "concurrency": 2, "tokens_per_minute": 60},
        {"name": "b", "token": "bbbbbbbb", "weight": 3, "shares": true}
    ]}"#;

    #[test]
    fn a_tenant_is_found_by_its_token_and_by_nothing_else() {
        let tenants = Tenants::parse(TWO).unwrap();
        assert_eq!(tenants.find(Some(b"Bearer bbbbbbbb")).unwrap().name, "b");
        assert_eq!(tenants.find(Some(b"bearer aaaaaaaa")).unwrap().name, "a");
        let wrong: [Option<&[u8]>; 7] = [
            None,
            Some(b""),
            Some(b"Bearer "),
            Some(b"Bearer aaaaaaa"),
            Some(b"Bearer aaaaaaaaa"),
            Some(b"Basic aaaaaaaa"),
            Some(b"aaaaaaaa"),
        ];
        for value in wrong {
            assert_eq!(tenants.find(value).unwrap_err().status, 401, "{value:?}");
        }
        assert!(Tenants::single(None).unwrap().find(None).is_ok());
        assert!(Tenants::single(Some("12345678")).unwrap().find(None).is_err());
    }

    #[test]
    fn quotas_say_when_there_is_room_again() {
        let tenants = Tenants::parse(TWO).unwrap();
        let (tenant, start) = (tenants.iter().next().unwrap(), Instant::now());
        let leave = tenant.enter(2, start).unwrap();
        let refused = tenant.enter(1, start).unwrap_err();
        assert_eq!((refused.status, refused.retry_after), (429, Some(Duration::from_secs(1))));
        drop(leave);
        assert_eq!(tenant.enter(3, start).unwrap_err().status, 400, "never");
        // What it may come to counts at once, and what was not used comes back.
        let mut leave = tenant.enter(1, start).unwrap();
        leave.take(150, start).unwrap();
        let mut other = tenant.enter(1, start).map(|_| ()).unwrap_err();
        assert_eq!((other.status, other.retry_after), (429, Some(Duration::from_secs(91))));
        leave.used(90);
        drop(leave);
        other = tenant.enter(1, start).unwrap_err();
        assert_eq!((other.status, other.retry_after), (429, Some(Duration::from_secs(31))));
        assert!(tenant.enter(1, start + Duration::from_secs(30)).is_err());
        assert!(tenant.enter(1, start + Duration::from_secs(31)).is_ok());
    }

    #[test]
    fn regression_one_of_several_tenants_does_not_fill_all_places() {
        let tenants = Tenants::parse(TWO).unwrap().sharing(40);
        let [one, other] = tenants.0.as_slice() else { panic!("two tenants") };
        let now = Instant::now();
        assert_eq!((one.concurrency, other.concurrency), (2, 30));
        let _leave = other.enter(30, now).unwrap();
        assert_eq!(other.enter(1, now).unwrap_err().status, 429);
        assert!(one.enter(2, now).is_ok());
        assert_eq!(Tenants::single(None).unwrap().sharing(40).0[0].concurrency, usize::MAX);
    }

    #[test]
    fn a_wrong_file_is_refused_by_name_and_repeats_no_token() {
        for (text, said) in [
            ("{", "line 1"),
            ("{}", "\"tenants\""),
            (r#"{"tenants": []}"#, "0 tenants"),
            (r#"{"tenants": [1]}"#, "an object with an array"),
            (r#"{"tenants": ["secretsecret"]}"#, "each member stands once: line 1"),
            (r#"{"tenants": [], "tenants": []}"#, "each member stands once"),
            (
                r#"{"tenants": [{"name": "a", "token": "secretsecret", "token": "other-secret"}]}"#,
                "each member stands once",
            ),
            (r#"{"tenants": [{"name": "", "token": "secretsecret"}]}"#, "tenants[0].name"),
            (r#"{"tenants": [{"name": "a\nb", "token": "secretsecret"}]}"#, "tenants[0].name"),
            (r#"{"tenants": [{"name": "a", "token": "secretsecret", "operator": "b"}]}"#, "tenants[0].operator"),
            (r#"{"tenants": [{"name": "a"}]}"#, "tenants[0].token"),
            (r#"{"tenants": [{"name": "a", "token": "short"}]}"#, "tenants[0].token"),
            (r#"{"tenants": [{"name": "a", "token": "secret secret"}]}"#, "tenants[0].token"),
            (r#"{"tenants": [{"name": "a", "token": "secretsecret", "weight": 0}]}"#, "tenants[0].weight"),
            (r#"{"tenants": [{"name": "a", "token": "secretsecret", "shares": 1}]}"#, "tenants[0].shares"),
            (r#"{"tenants": [{"name": "a", "token": "secretsecret", "quota": 1}]}"#, "tenants[0].quota"),
            (
                r#"{"tenants": [{"name": "a", "token": "secretsecret"}, {"name": "a", "token": "other-secret"}]}"#,
                "same name",
            ),
            (
                r#"{"tenants": [{"name": "a", "token": "secretsecret"}, {"name": "b", "token": "secretsecret"}]}"#,
                "same token",
            ),
        ] {
            let why = Tenants::parse(text).unwrap_err();
            assert!(why.contains(said) && !why.contains("secretsecret"), "{text}: {why}");
        }
    }
}
