//! ResourcePoolStatusRequest: how many devices of a driver's pools are free, asked once.

use k8s_openapi::api::resource::v1alpha3::{
    PoolStatus, ResourcePoolStatusRequest, ResourcePoolStatusRequestStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use machinery::names;
use serde_json::Value;

use super::pool_name;
use crate::kind::{Kind, Rules, STATUS, name, spec_and_bare_status, text};
use crate::print::since;
use crate::validate::at::At;
use crate::validate::shared::{conditions, immutable};

const LIMIT: i32 = 100;

pub(crate) static KIND: Kind<ResourcePoolStatusRequest> = Kind {
    optional: true,
    subresources: &[STATUS],
    default: |request| {
        request.spec.limit.get_or_insert(LIMIT);
    },
    parts: Some(spec_and_bare_status!()),
    rules: Rules {
        create: pool_request,
        update: Some(pool_request_update),
        parts: &[("status", pool_request_status)],
        unconditional_update: false,
        ..Rules::NONE
    },
    returns_deleted: true,
    columns: &[
        name(),
        text("Driver", "string", "The driver to query pools for.", |request| {
            request.spec.driver.clone().into()
        }),
        text("Total", "string", "Total number of devices across all pools.", |request| {
            sum(request, |pool| pool.total_devices.unwrap_or_default())
        }),
        text("Available", "string", "Number of available devices across all pools.", |request| {
            sum(request, |pool| pool.available_devices.unwrap_or_default())
        }),
        text("Allocated", "string", "Number of allocated devices across all pools.", |request| {
            sum(request, |pool| pool.allocated_devices.unwrap_or_default())
        }),
        text(
            "Unavailable",
            "string",
            "Number of unavailable devices across all pools.",
            |request| sum(request, |pool| pool.unavailable_devices.unwrap_or_default()),
        ),
        text("Errors", "string", "Number of pools with validation errors.", |request| {
            sum(request, |pool| i32::from(pool.validation_error.is_some()))
        }),
        text("Pools", "integer", "Total number of matching pools.", |request| {
            request.status.as_ref().map_or(0, |status| status.pool_count).into()
        }),
        text("Status", "string", "Processing status.", |request| state(request).into()),
        text("Completed", "string", "Time since the observation completed.", |request| {
            let completed = done(request).filter(|one| one.type_ != "Failed");
            completed.map_or("<none>".into(), |one| since(Some(&one.last_transition_time))).into()
        }),
    ],
    ..Kind::BASE
};

/// The condition that ended the request.
fn done(request: &ResourcePoolStatusRequest) -> Option<&Condition> {
    let mut conditions = request.status.as_ref()?.conditions.iter().flatten();
    conditions.find(|one| one.status == "True" && matches!(&*one.type_, "Complete" | "Failed"))
}

fn is_failed(request: &ResourcePoolStatusRequest) -> bool {
    done(request).is_some_and(|one| one.type_ == "Failed")
}

fn pools(status: &ResourcePoolStatusRequestStatus) -> &[PoolStatus] {
    status.pools.as_deref().unwrap_or_default()
}

fn sum(request: &ResourcePoolStatusRequest, figure: fn(&PoolStatus) -> i32) -> Value {
    match &request.status {
        Some(status) if !is_failed(request) => {
            let figures = pools(status).iter().map(|pool| i64::from(figure(pool)));
            figures.sum::<i64>().to_string().into()
        }
        _ => "-".into(),
    }
}

fn state(request: &ResourcePoolStatusRequest) -> String {
    let (Some(status), Some(_)) = (&request.status, done(request)) else {
        return "Pending".into();
    };
    let shown = i32::try_from(pools(status).len()).unwrap_or(i32::MAX);
    if is_failed(request) {
        "Failed".into()
    } else if status.pool_count > shown {
        format!("Complete ({shown}/{} pools)", status.pool_count)
    } else {
        "Complete".into()
    }
}

fn pool_request(at: &At<'_>) {
    const MOST: i64 = 1000;
    let spec = at.get("spec");
    let [driver, pool, limit] = ["driver", "poolName", "limit"].map(|field| spec.get(field));
    driver.need_name(|text| names::dns1123_subdomain(&text.to_lowercase()));
    if pool.is_set() {
        pool_name(&pool);
    }
    limit.at_least(1);
    at_most(&limit, MOST);
}

fn at_most(at: &At<'_>, most: i64) {
    if at.number().is_some_and(|number| number > most) {
        at.invalid(&format!("must be less than or equal to {most}"));
    }
}

fn pool_request_update(at: &At<'_>, old: &At<'_>) {
    immutable(&at.get("spec"), &old.get("spec"));
}

/// An answer is given once.
fn pool_request_status(at: &At<'_>, old: &At<'_>) {
    const POOLS: usize = 1000;
    const CONDITIONS: usize = 10;
    const FIGURES: &[&str] = &[
        "generation",
        "totalDevices",
        "allocatedDevices",
        "availableDevices",
        "unavailableDevices",
    ];
    let status = at.get("status");
    if old.has("status") {
        return status.unchanged(&old.get("status"));
    }
    if !status.is_set() {
        return;
    }
    conditions(&status.get("conditions"));
    status.get("poolCount").not_negative();
    for (field, most) in [("pools", POOLS), ("conditions", CONDITIONS)] {
        if status.get(field).len() > most {
            status.get(field).too_many(most);
        }
    }
    for pool in status.get("pools").items() {
        pool.get("driver").need_name(|text| names::dns1123_subdomain(&text.to_lowercase()));
        pool_name(&pool.get("poolName"));
        FIGURES.iter().for_each(|field| pool.get(field).not_negative());
        pool.get("resourceSliceCount").at_least(1);
        pool.get("nodeName").any_name(names::dns1123_subdomain);
    }
}
