//! resource.k8s.io: devices, and claims to them.

use k8s_openapi::api::resource::v1::{
    DeviceClass, ResourceClaim, ResourceClaimTemplate, ResourceSlice,
};

use crate::Row;
use crate::defaults;
use crate::gated;
use crate::parts::{Simple, SpecStatus, parts};
use crate::print::name_and_age_cells;
use crate::printers;

pub(crate) const ROWS: &[fn() -> Row] = &[
    || {
        let strategy = Simple::<DeviceClass>::new(|class| name_and_age_cells(class));
        let strategy = strategy.closed(gated::device_class);
        Row::new::<DeviceClass>(strategy.generation(|new, old| new.spec != old.spec))
    },
    || {
        let strategy = SpecStatus::new(parts!(ResourceClaim))
            .cells(printers::resource_claim)
            .default(defaults::resource_claim)
            .closed(gated::resource_claim);
        Row::new::<ResourceClaim>(strategy).status()
    },
    || {
        let strategy = Simple::<ResourceClaimTemplate>::new(|claim| name_and_age_cells(claim))
            .default(defaults::claim_template)
            .closed(gated::claim_template);
        Row::new::<ResourceClaimTemplate>(strategy)
    },
    || {
        let strategy = Simple::<ResourceSlice>::new(printers::resource_slice).selectable(
            &["spec.nodeName", "spec.driver"],
            |slice| {
                vec![
                    ("spec.nodeName", slice.spec.node_name.clone().unwrap_or_default()),
                    ("spec.driver", slice.spec.driver.clone()),
                ]
            },
        );
        let strategy = strategy.closed(gated::slice);
        Row::new::<ResourceSlice>(strategy.generation(|new, old| new.spec != old.spec))
    },
];
