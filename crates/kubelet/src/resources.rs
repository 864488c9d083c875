//! Requests and limits: a pod's sums, its QoS class, and the kernel's numbers for both.
//!
//! In: pods. Out: numbers. Pure.
//! Upstream: `pkg/apis/core/v1/helper/qos`, `component-helpers/resource`, `cm/helpers_linux`.

use std::collections::BTreeMap;

use api::qos;
pub use api::qos::{BEST_EFFORT, BURSTABLE, GUARANTEED};
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

pub type ResourceList = BTreeMap<String, Quantity>;

pub const MIN_SHARES: i64 = 2;
const MAX_SHARES: i64 = 262_144;
const MIN_QUOTA: i64 = 1000;
/// The CPU limit of the smallest quota.
pub const MIN_MILLI_CPU_LIMIT: i64 = 10;
/// Microseconds.
const CPU_PERIOD: i64 = 100_000;

/// A quantity in thousandths, rounded up; invalid text counts as zero (the API server rejects it).
pub fn milli(quantity: &Quantity) -> i64 {
    nanos(&quantity.0).map_or(0, |n| clamp(div_ceil(n, 1_000_000)))
}

/// A quantity in whole units, rounded up.
pub fn units(quantity: &Quantity) -> i64 {
    nanos(&quantity.0).map_or(0, |n| clamp(div_ceil(n, 1_000_000_000)))
}

fn clamp(n: i128) -> i64 {
    n.clamp(i64::MIN as i128, i64::MAX as i128) as i64
}

fn div_ceil(n: i128, by: i128) -> i128 {
    n.div_euclid(by) + i128::from(n.rem_euclid(by) != 0)
}

/// The number in units of 10⁻⁹; further digits round up.
fn nanos(text: &str) -> Option<i128> {
    let (number, factor, exponent) = split_suffix(text.trim())?;
    let (negative, number) = match number.strip_prefix('-') {
        Some(rest) => (true, rest),
        None => (false, number.strip_prefix('+').unwrap_or(number)),
    };
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits: i128 = format!("{whole}{fraction}").parse().ok()?;
    let mut scaled = digits.checked_mul(factor)?;
    // value = scaled × 10^(exponent − fraction digits); wanted × 10^9
    let power = exponent + 9 - fraction.len() as i32;
    if power >= 0 {
        scaled = scaled.checked_mul(10_i128.checked_pow(power as u32)?)?;
    } else {
        scaled = div_ceil(scaled, 10_i128.checked_pow(power.unsigned_abs())?);
    }
    Some(if negative { -scaled } else { scaled })
}

/// (digits, binary factor, decimal exponent)
fn split_suffix(text: &str) -> Option<(&str, i128, i32)> {
    const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    for (index, suffix) in BINARY.iter().enumerate() {
        if let Some(number) = text.strip_suffix(suffix) {
            return Some((number, 1_i128 << (10 * (index + 1)), 0));
        }
    }
    if let Some(at) = text.find(['e', 'E'])
        && let Ok(exponent) = text[at + 1..].parse::<i32>()
    {
        return Some((&text[..at], 1, exponent));
    }
    let exponent = match text.chars().last()? {
        'n' => -9,
        'u' => -6,
        'm' => -3,
        'k' => 3,
        'M' => 6,
        'G' => 9,
        'T' => 12,
        'P' => 15,
        'E' => 18,
        c if c.is_ascii_digit() || c == '.' => return Some((text, 1, 0)),
        _ => return None,
    };
    Some((&text[..text.len() - 1], 1, exponent))
}

/// A container's request or limit of one resource; `None` if it sets none.
pub fn request<'a>(
    resources: Option<&'a ResourceRequirements>,
    name: &str,
) -> Option<&'a Quantity> {
    resources?.requests.as_ref()?.get(name)
}

pub fn limit<'a>(resources: Option<&'a ResourceRequirements>, name: &str) -> Option<&'a Quantity> {
    resources?.limits.as_ref()?.get(name)
}

/// True for an init container that keeps running beside the main containers.
pub fn is_sidecar(container: &Container) -> bool {
    container.restart_policy.as_deref() == Some("Always")
}

/// The pod's requests, in thousandths of each resource: the larger of the containers' sum and the maximum
/// during initialisation, plus overhead. Pod-level requests win.
pub fn pod_requests(spec: &PodSpec) -> BTreeMap<String, i64> {
    pod_sum(spec, |resources| resources.and_then(|r| r.requests.as_ref()))
}

/// Like [`pod_requests`], for limits.
pub fn pod_limits(spec: &PodSpec) -> BTreeMap<String, i64> {
    pod_sum(spec, |resources| resources.and_then(|r| r.limits.as_ref()))
}

fn pod_sum(
    spec: &PodSpec,
    pick: impl Fn(Option<&ResourceRequirements>) -> Option<&ResourceList>,
) -> BTreeMap<String, i64> {
    let add = |into: &mut BTreeMap<String, i64>, from: Option<&ResourceList>| {
        for (name, quantity) in from.into_iter().flatten() {
            *into.entry(name.clone()).or_default() += milli(quantity);
        }
    };
    let raise = |into: &mut BTreeMap<String, i64>, from: &BTreeMap<String, i64>| {
        for (name, amount) in from {
            let entry = into.entry(name.clone()).or_default();
            *entry = (*entry).max(*amount);
        }
    };
    let mut running = BTreeMap::new();
    let mut sidecars = BTreeMap::new();
    let mut peak = BTreeMap::new();
    for container in &spec.containers {
        add(&mut running, pick(container.resources.as_ref()));
    }
    for container in spec.init_containers.iter().flatten() {
        let own = pick(container.resources.as_ref());
        if is_sidecar(container) {
            add(&mut running, own);
            add(&mut sidecars, own);
            raise(&mut peak, &sidecars);
        } else {
            let mut moment = sidecars.clone();
            add(&mut moment, own);
            raise(&mut peak, &moment);
        }
    }
    raise(&mut running, &peak);
    for (name, quantity) in pick(spec.resources.as_ref()).into_iter().flatten() {
        running.insert(name.clone(), milli(quantity));
    }
    add(&mut running, spec.overhead.as_ref());
    running
}

/// Upstream: ComputePodQOS.
pub fn qos_class(pod: &Pod) -> &'static str {
    pod.spec.as_ref().map_or(BEST_EFFORT, qos::class)
}

pub fn cpu_shares(milli_cpu: i64) -> i64 {
    if milli_cpu == 0 {
        return MIN_SHARES;
    }
    (milli_cpu * 1024 / 1000).clamp(MIN_SHARES, MAX_SHARES)
}

/// How CPU limits hold: the kernel's CFS quotas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cfs {
    pub is_on: bool,
    /// Microseconds.
    pub period: i64,
    /// The containers have CPUs of their own, which a quota would only throttle.
    pub is_exclusive: bool,
}

impl Default for Cfs {
    fn default() -> Self {
        Self { is_on: true, period: CPU_PERIOD, is_exclusive: false }
    }
}

impl Cfs {
    /// Microseconds of CPU per period; 0: unchanged, negative: unlimited.
    pub fn quota(self, milli_cpu: i64) -> i64 {
        if !self.is_on || milli_cpu == 0 {
            return 0;
        }
        match self.is_exclusive {
            true => -1,
            false => (milli_cpu * self.period / 1000).max(MIN_QUOTA),
        }
    }

    /// 0 if quotas are off.
    pub fn period(self) -> i64 {
        if self.is_on { self.period } else { 0 }
    }
}

/// cgroup v2's weight (1..10000) for v1's shares (2..262144), by the mapping that OCI runtimes use.
pub fn cpu_weight(shares: i64) -> i64 {
    1 + ((shares.clamp(MIN_SHARES, MAX_SHARES) - 2) * 9999) / 262_142
}

/// The container's OOM score adjustment.
pub fn oom_score_adj(pod: &Pod, container: &Container, memory_capacity: i64) -> i64 {
    let critical = pod.spec.as_ref().and_then(|s| s.priority).is_some_and(|p| p >= 2_000_001_000);
    if critical {
        return -997;
    }
    match qos_class(pod) {
        GUARANTEED => -997,
        BEST_EFFORT => 1000,
        _ => {
            let request = request(container.resources.as_ref(), "memory").map_or(0, units);
            let share = (1000_i128 * i128::from(request)) / i128::from(memory_capacity.max(1));
            (1000 - clamp(share)).clamp(3, 999)
        }
    }
}

/// Bytes in the largest unit of Mi and Ki that divides them.
pub fn bytes_quantity(bytes: i64) -> Quantity {
    for (suffix, shift) in [("Mi", 20), ("Ki", 10)] {
        if bytes != 0 && bytes % (1 << shift) == 0 {
            return Quantity(format!("{}{suffix}", bytes >> shift));
        }
    }
    Quantity(bytes.to_string())
}

/// `2Mi` in the kernel's form: `2MB`.
pub fn huge_page_size(size: &str) -> Option<String> {
    let number = size.strip_suffix('i')?;
    let valid =
        number.ends_with(['K', 'M', 'G']) && number[..number.len() - 1].parse::<u64>().is_ok();
    valid.then(|| format!("{number}B"))
}

/// A count in the API server's form: `12`, `3k`.
pub fn count_quantity(count: i64) -> Quantity {
    for (suffix, by) in [("G", 1_000_000_000), ("M", 1_000_000), ("k", 1000)] {
        if count != 0 && count % by == 0 {
            return Quantity(format!("{}{suffix}", count / by));
        }
    }
    Quantity(count.to_string())
}

/// `example.com/dongle`: a resource outside of Kubernetes' names. Upstream: `IsExtendedResourceName`.
pub fn is_extended(name: &str) -> bool {
    name.contains('/')
        && !name.contains("kubernetes.io/")
        && !name.starts_with("requests.")
        && machinery::names::qualified_name(&format!("requests.{name}")).is_empty()
}

/// Thousandths as text: `1`, `250m`.
pub fn milli_quantity(milli: i64) -> Quantity {
    if milli % 1000 == 0 {
        Quantity((milli / 1000).to_string())
    } else {
        Quantity(format!("{milli}m"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pod(spec: serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).expect("a pod")
    }

    #[test]
    fn quantities() {
        let check = |text: &str, expected_milli: i64, expected_units: i64| {
            let quantity = Quantity(text.into());
            assert_eq!(
                (milli(&quantity), units(&quantity)),
                (expected_milli, expected_units),
                "{text}"
            );
        };
        check("1", 1000, 1);
        check("100m", 100, 1);
        check("0.5", 500, 1);
        check("1.5Gi", 1_610_612_736_000, 1_610_612_736);
        check("128Mi", 134_217_728_000, 134_217_728);
        check("2k", 2_000_000, 2000);
        check("1e3", 1_000_000, 1000);
        check("1n", 1, 1);
        check("-1", -1000, -1);
        check("nonsense", 0, 0);
        check("1E", 1_000_000_000_000_000_000_i64.saturating_mul(1000), 1_000_000_000_000_000_000);
    }

    #[test]
    fn qos() {
        let check = |containers: serde_json::Value, expected: &str| {
            assert_eq!(qos_class(&pod(json!({ "containers": containers }))), expected);
        };
        check(json!([{"name": "a"}]), BEST_EFFORT);
        check(json!([{"name": "a", "resources": {"requests": {"cpu": "1"}}}]), BURSTABLE);
        let full = json!({"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "1", "memory": "1Gi"}});
        check(json!([{"name": "a", "resources": full}]), GUARANTEED);
        check(json!([{"name": "a", "resources": full}, {"name": "b"}]), BURSTABLE);
        check(
            json!([{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}}}]),
            GUARANTEED,
        );
        check(
            json!([{"name": "a", "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}}}]),
            BURSTABLE,
        );
    }

    #[test]
    fn requests_of_a_pod_cover_its_initialisation() {
        let cpu = |amount: &str| json!({"requests": {"cpu": amount}});
        let check = |spec: serde_json::Value, expected: i64| {
            assert_eq!(pod_requests(&pod(spec).spec.expect("a spec"))["cpu"], expected);
        };
        check(
            json!({"containers": [{"name": "a", "resources": cpu("1")}, {"name": "b", "resources": cpu("1")}]}),
            2000,
        );
        check(
            json!({"containers": [{"name": "a", "resources": cpu("1")}],
                "initContainers": [{"name": "i", "resources": cpu("3")}]}),
            3000,
        );
        check(
            json!({"containers": [{"name": "a", "resources": cpu("1")}],
                "initContainers": [{"name": "s", "restartPolicy": "Always", "resources": cpu("1")},
                    {"name": "i", "resources": cpu("2")}]}),
            3000,
        );
    }

    #[test]
    fn kernel_numbers() {
        assert_eq!((cpu_shares(0), cpu_shares(1000), cpu_shares(1)), (2, 1024, 2));
        let quota = |milli| Cfs::default().quota(milli);
        assert_eq!((quota(0), quota(5), quota(1500)), (0, 1000, 150_000));
        let short = Cfs { period: 10_000, ..Cfs::default() };
        assert_eq!((short.quota(1500), short.quota(50)), (15_000, 1000));
        let alone = Cfs { is_exclusive: true, ..Cfs::default() };
        assert_eq!((alone.quota(0), alone.quota(1500)), (0, -1));
        let off = Cfs { is_on: false, ..Cfs::default() };
        assert_eq!((off.quota(1500), off.period()), (0, 0));
        assert_eq!((cpu_weight(2), cpu_weight(1024), cpu_weight(262_144)), (1, 39, 10_000));
    }
}
