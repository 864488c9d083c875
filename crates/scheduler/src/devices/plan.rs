//! The requests of claims, with defaults and device classes.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{
    DeviceClass, DeviceConstraint, DeviceRequest, DeviceSelector, DeviceSubRequest,
    DeviceToleration, ExactDeviceRequest, ResourceClaim,
};

use super::capacity::Wanted;
use super::{Failure, title};

/// One way to satisfy a request.
#[derive(Debug)]
pub struct Ask {
    /// The count of the request,
    pub base: String,
    /// and of the alternative, if it is one.
    pub sub: Option<String>,
    pub class: Arc<DeviceClass>,
    /// `None`: all that there are.
    pub count: Option<usize>,
    pub admin: bool,
    pub selectors: Vec<DeviceSelector>,
    pub tolerations: Vec<DeviceToleration>,
    pub wanted: Option<Wanted>,
}

impl Ask {
    /// Its name in results.
    pub fn name(&self) -> String {
        match &self.sub {
            Some(sub) => format!("{}/{sub}", self.base),
            None => self.base.clone(),
        }
    }

    /// Its name in messages.
    pub fn short_name(&self) -> &str {
        self.sub.as_deref().unwrap_or(&self.base)
    }

    /// Whether this request is in the list. A request includes its alternatives; an empty list means all.
    pub fn is_one_of(&self, requests: Option<&Vec<String>>) -> bool {
        let requests = requests.map_or(&[][..], Vec::as_slice);
        requests.is_empty() || requests.iter().any(|one| *one == self.base || *one == self.name())
    }
}

/// Ways to satisfy a request, the preferred first.
#[derive(Debug)]
pub struct Request {
    pub asks: Vec<Ask>,
    pub has_alternatives: bool,
}

pub struct Plan<'a> {
    pub claim: &'a ResourceClaim,
    pub title: String,
    pub requests: Vec<Request>,
    pub constraints: &'a [DeviceConstraint],
}

type Classes = BTreeMap<String, Arc<DeviceClass>>;

pub fn plan<'a>(claim: &'a ResourceClaim, classes: &Classes) -> Result<Plan<'a>, Failure> {
    let title = title(claim);
    let devices = claim.spec.devices.as_ref();
    let requests = devices.iter().flat_map(|devices| devices.requests.iter().flatten());
    let requests = requests
        .map(|request| request_of(request, classes, &title))
        .collect::<Result<Vec<_>, _>>()?;
    let constraints =
        devices.and_then(|devices| devices.constraints.as_deref()).unwrap_or_default();
    let is_empty =
        |one: &DeviceConstraint| one.match_attribute.is_none() && one.distinct_attribute.is_none();
    if let Some(at) = constraints.iter().position(is_empty) {
        let why = "empty constraint (unsupported constraint type?)";
        return Err(Failure::Broken(format!("claim {title}, constraint #{at}: {why}")));
    }
    Ok(Plan { claim, title, requests, constraints })
}

fn request_of(request: &DeviceRequest, classes: &Classes, title: &str) -> Result<Request, Failure> {
    let subs = request.first_available.as_deref().unwrap_or_default();
    let has_alternatives = !subs.is_empty();
    let asks = match &request.exactly {
        Some(exactly) if !has_alternatives => {
            vec![ask(&request.name, None, exactly.clone(), classes, title)?]
        }
        _ => {
            let asks = subs.iter().map(|sub| {
                ask(&request.name, Some(sub.name.clone()), exactly_of(sub), classes, title)
            });
            asks.collect::<Result<_, _>>()?
        }
    };
    if asks.is_empty() {
        let why = format!("claim {title}, request {}: unknown request type", request.name);
        return Err(Failure::Broken(why));
    }
    Ok(Request { asks, has_alternatives })
}

/// An alternative asks for what a request asks for, but for the access of administrators.
fn exactly_of(sub: &DeviceSubRequest) -> ExactDeviceRequest {
    ExactDeviceRequest {
        admin_access: None,
        allocation_mode: sub.allocation_mode.clone(),
        capacity: sub.capacity.clone(),
        count: sub.count,
        device_class_name: sub.device_class_name.clone(),
        selectors: sub.selectors.clone(),
        tolerations: sub.tolerations.clone(),
    }
}

fn ask(
    base: &str,
    sub: Option<String>,
    exactly: ExactDeviceRequest,
    classes: &Classes,
    title: &str,
) -> Result<Ask, Failure> {
    let name = sub.as_deref().unwrap_or(base);
    let broken = |why: String| Failure::Broken(format!("claim {title}, request {name}{why}"));
    let selectors = exactly.selectors.unwrap_or_default();
    if let Some(at) = selectors.iter().position(|one| one.cel.is_none()) {
        let why = "CEL expression empty (unsupported selector type?)";
        return Err(broken(format!(", selector #{at}: {why}")));
    }
    let class = &exactly.device_class_name;
    if class.is_empty() {
        return Err(broken(": missing device class name (unsupported request type?)".into()));
    }
    let known = classes.get(class).cloned().ok_or_else(|| {
        let why = format!("deviceclass.resource.k8s.io {class:?} not found");
        broken(format!(": could not retrieve device class {class}: {why}"))
    })?;
    let count = match exactly.allocation_mode.as_deref() {
        None | Some("" | "ExactCount") => {
            let count = exactly.count.unwrap_or(1);
            Some(
                usize::try_from(count)
                    .map_err(|_| broken(format!(": exact count {count} is too large")))?,
            )
        }
        Some("All") => None,
        Some(other) => return Err(broken(format!(": unsupported count mode {other}"))),
    };
    Ok(Ask {
        base: base.to_owned(),
        class: known,
        count,
        admin: exactly.admin_access == Some(true),
        selectors,
        tolerations: exactly.tolerations.unwrap_or_default(),
        wanted: exactly.capacity.and_then(|capacity| capacity.requests),
        sub,
    })
}
