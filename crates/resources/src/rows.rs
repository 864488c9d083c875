//! The rows of kinds that need no file of their own yet: nothing but a name, a status, columns.

use k8s_openapi::api::{
    admissionregistration::v1 as admission, batch::v1 as batch, certificates::v1 as certificates,
    coordination::v1 as coordination, discovery::v1 as discovery, flowcontrol::v1 as flowcontrol,
    networking::v1 as networking, node::v1 as node, policy::v1 as policy, rbac::v1 as rbac,
    scheduling::v1 as scheduling, storage::v1 as storage,
};
use machinery::Object;
use serde_json::Value;

use crate::Row;
use crate::core::podspec;
use crate::defaults::{self, fill};
use crate::gated;
use crate::parts::{Plain, Simple, SpecStatus, parts};
use crate::print::{age, or_none};
use crate::printers;

pub(crate) const ROWS: &[fn() -> Row] = &[
    || {
        let strategy = Simple::new(printers::mutating_policy).default(defaults::mutating_policy);
        Row::new::<admission::MutatingAdmissionPolicy>(
            strategy.generation(|new, old| new.spec != old.spec),
        )
        .categories(API_EXTENSIONS)
    },
    || {
        let strategy = Simple::new(printers::mutating_binding).default(defaults::mutating_binding);
        Row::new::<admission::MutatingAdmissionPolicyBinding>(
            strategy.generation(|new, old| new.spec != old.spec),
        )
        .categories(API_EXTENSIONS)
    },
    || {
        let strategy =
            Simple::new(printers::mutating_webhooks).default(defaults::mutating_webhooks);
        Row::new::<admission::MutatingWebhookConfiguration>(
            strategy.generation(|new, old| new.webhooks != old.webhooks),
        )
        .categories(API_EXTENSIONS)
    },
    || {
        let strategy = SpecStatus::new(parts!(admission::ValidatingAdmissionPolicy)).generation();
        Row::new::<admission::ValidatingAdmissionPolicy>(
            strategy.cells(printers::validating_policy).default(defaults::validating_policy),
        )
        .categories(API_EXTENSIONS)
        .status()
    },
    || {
        let strategy =
            Simple::new(printers::validating_binding).default(defaults::validating_binding);
        Row::new::<admission::ValidatingAdmissionPolicyBinding>(
            strategy.generation(|new, old| new.spec != old.spec),
        )
        .categories(API_EXTENSIONS)
    },
    || {
        let strategy =
            Simple::new(printers::validating_webhooks).default(defaults::validating_webhooks);
        Row::new::<admission::ValidatingWebhookConfiguration>(
            strategy.generation(|new, old| new.webhooks != old.webhooks),
        )
        .categories(API_EXTENSIONS)
    },
    cron_job,
    job,
    certificate_signing_request,
    lease,
    endpoint_slice,
    || {
        let strategy = SpecStatus::new(parts!(flowcontrol::FlowSchema)).generation();
        Row::new::<flowcontrol::FlowSchema>(
            strategy.cells(printers::flow_schema).default(defaults::flow_schema),
        )
        .status()
    },
    || {
        let strategy =
            SpecStatus::new(parts!(flowcontrol::PriorityLevelConfiguration)).generation();
        Row::new::<flowcontrol::PriorityLevelConfiguration>(
            strategy.cells(printers::priority_level).default(defaults::priority_level),
        )
        .status()
    },
    || {
        Row::new::<networking::IPAddress>(Simple::new(printers::ip_address))
            .short(&["ip"])
            .storage("ipaddresses")
    },
    || {
        let strategy = SpecStatus::new(parts!(networking::Ingress)).generation();
        Row::new::<networking::Ingress>(strategy.cells(printers::ingress))
            .short(&["ing"])
            .storage("ingress")
            .status()
    },
    || {
        Row::new::<networking::IngressClass>(
            Simple::new(printers::ingress_class)
                .default(defaults::ingress_class)
                .generation(|new, old| new.spec != old.spec),
        )
    },
    || {
        Row::new::<networking::NetworkPolicy>(
            Simple::new(printers::network_policy)
                .default(defaults::network_policy)
                .generation(|new, old| new.spec != old.spec),
        )
        .short(&["netpol"])
    },
    || {
        let strategy = SpecStatus::new(parts!(networking::ServiceCIDR));
        Row::new::<networking::ServiceCIDR>(strategy.cells(printers::service_cidr)).status()
    },
    || Row::new::<node::RuntimeClass>(Simple::new(printers::runtime_class)),
    || {
        let strategy = SpecStatus::new(parts!(policy::PodDisruptionBudget)).generation();
        Row::new::<policy::PodDisruptionBudget>(strategy.cells(printers::disruption_budget))
            .short(&["pdb"])
            .status()
    },
    || Row::new::<rbac::ClusterRole>(Plain::<rbac::ClusterRole>::new()),
    cluster_role_binding,
    || Row::new::<rbac::Role>(Plain::<rbac::Role>::new()),
    role_binding,
    priority_class,
    || {
        Row::new::<storage::CSIDriver>(
            Simple::new(printers::csi_driver)
                .default(defaults::csi_driver)
                .closed(gated::csi_driver),
        )
    },
    || Row::new::<storage::CSINode>(Simple::new(printers::csi_node)),
    || Row::new::<storage::CSIStorageCapacity>(Plain::<storage::CSIStorageCapacity>::new()),
    storage_class,
    || {
        let strategy = SpecStatus::new(parts!(storage::VolumeAttachment));
        Row::new::<storage::VolumeAttachment>(strategy.cells(printers::volume_attachment)).status()
    },
    || {
        Row::new::<storage::VolumeAttributesClass>(Simple::new(printers::attributes_class))
            .short(&["vac"])
    },
    crate::api_service::row,
    crate::component_status::row,
];

const API_EXTENSIONS: &[&str] = &["api-extensions"];

fn cron_job() -> Row {
    fn default(job: &mut batch::CronJob) {
        let spec = &mut job.spec;
        fill(&mut spec.concurrency_policy, "Allow");
        spec.suspend.get_or_insert(false);
        spec.successful_jobs_history_limit.get_or_insert(3);
        spec.failed_jobs_history_limit.get_or_insert(1);
        let inner = spec.job_template.spec.get_or_insert_default();
        podspec::default_template(&mut inner.template);
        job.status.get_or_insert_default();
    }
    fn cells(job: &batch::CronJob) -> Vec<Value> {
        let (spec, status) = (job.spec.clone(), job.status.clone().unwrap_or_default());
        let inner = spec.job_template.spec.clone().unwrap_or_default();
        let (names, images) =
            crate::print::containers(&inner.template.spec.unwrap_or_default().containers);
        let last = status
            .last_schedule_time
            .as_ref()
            .map_or("<none>".into(), |time| crate::print::since(Some(time)));
        let suspended = if spec.suspend == Some(true) { "True" } else { "False" };
        vec![
            job.name().into(),
            spec.schedule.into(),
            or_none(spec.time_zone.unwrap_or_default()).into(),
            suspended.into(),
            status.active.map_or(0, |active| active.len()).into(),
            last.into(),
            age(job),
            names.into(),
            images.into(),
            crate::print::selector(inner.selector.as_ref()).into(),
        ]
    }
    Row::new::<batch::CronJob>(
        SpecStatus::new(parts!(batch::CronJob))
            .generation()
            .default(default)
            .closed(gated::cron_job)
            .cells(cells),
    )
    .short(&["cj"])
    .categories(&["all"])
    .status()
}

fn job() -> Row {
    Row::new::<batch::Job>(crate::job::JobStrategy).categories(&["all"]).status()
}

fn certificate_signing_request() -> Row {
    Row::new::<certificates::CertificateSigningRequest>(crate::csr::CsrStrategy)
        .short(&["csr"])
        .status()
        .part("approval")
}

fn lease() -> Row {
    fn cells(lease: &coordination::Lease) -> Vec<Value> {
        let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
        vec![lease.name().into(), holder.unwrap_or_default().into(), age(lease)]
    }
    Row::new::<coordination::Lease>(Simple::new(cells).closed(gated::lease))
}

fn endpoint_slice() -> Row {
    fn cells(slice: &discovery::EndpointSlice) -> Vec<Value> {
        let port = |port: &discovery::EndpointPort| {
            port.port.map_or("*".to_owned(), |number| number.to_string())
        };
        let ports: Vec<String> = slice.ports.iter().flatten().map(port).collect();
        let addresses: Vec<String> =
            slice.endpoints.iter().flatten().flat_map(|one| one.addresses.clone()).collect();
        let listed = if slice.ports.is_none() { "<unset>".into() } else { first_three(ports) };
        let shown = if addresses.is_empty() { "<unset>".into() } else { first_three(addresses) };
        vec![
            slice.name().into(),
            slice.address_type.clone().into(),
            listed.into(),
            shown.into(),
            age(slice),
        ]
    }
    fn default(slice: &mut discovery::EndpointSlice) {
        for port in slice.ports.iter_mut().flatten() {
            fill(&mut port.protocol, "TCP");
            port.name.get_or_insert_default();
        }
    }
    // Whoever sends an empty list owns it; to everybody else there is none.
    fn no_empty_list(slice: &mut discovery::EndpointSlice, _: Option<&discovery::EndpointSlice>) {
        slice.endpoints.take_if(|endpoints| endpoints.is_empty());
    }
    let strategy = Simple::new(cells).default(default).closed(no_empty_list);
    Row::new::<discovery::EndpointSlice>(strategy.generation(|new, old| {
        (&new.endpoints, &new.ports, &new.metadata.labels)
            != (&old.endpoints, &old.ports, &old.metadata.labels)
    }))
}

fn first_three(mut all: Vec<String>) -> String {
    let more = all.len().saturating_sub(3);
    all.truncate(3);
    let text = all.join(",");
    if more > 0 { format!("{text} + {more} more...") } else { text }
}

fn cluster_role_binding() -> Row {
    fn cells(binding: &rbac::ClusterRoleBinding) -> Vec<Value> {
        let mut cells = vec![
            binding.name().into(),
            format!("{}/{}", binding.role_ref.kind, binding.role_ref.name).into(),
            age(binding),
        ];
        cells.extend(subjects(binding.subjects.as_deref()));
        cells
    }
    fn default(binding: &mut rbac::ClusterRoleBinding) {
        default_binding(&mut binding.role_ref, &mut binding.subjects);
    }
    Row::new::<rbac::ClusterRoleBinding>(Simple::new(cells).default(default))
}

fn role_binding() -> Row {
    fn cells(binding: &rbac::RoleBinding) -> Vec<Value> {
        let mut cells = vec![
            binding.name().into(),
            format!("{}/{}", binding.role_ref.kind, binding.role_ref.name).into(),
            age(binding),
        ];
        cells.extend(subjects(binding.subjects.as_deref()));
        cells
    }
    fn default(binding: &mut rbac::RoleBinding) {
        default_binding(&mut binding.role_ref, &mut binding.subjects);
    }
    Row::new::<rbac::RoleBinding>(Simple::new(cells).default(default))
}

fn default_binding(role: &mut rbac::RoleRef, subjects: &mut Option<Vec<rbac::Subject>>) {
    const GROUP: &str = "rbac.authorization.k8s.io";
    fill(&mut role.api_group, GROUP);
    for subject in subjects.iter_mut().flatten() {
        if matches!(subject.kind.as_str(), "User" | "Group") {
            fill(&mut subject.api_group, GROUP);
        }
    }
    subjects.take_if(|subjects| subjects.is_empty());
}

fn subjects(subjects: Option<&[rbac::Subject]>) -> Vec<Value> {
    let of = |kind: &str| {
        let all = subjects.unwrap_or_default().iter().filter(|subject| subject.kind == kind);
        let names: Vec<String> = all
            .map(|subject| {
                match subject.namespace.as_deref().filter(|_| kind == "ServiceAccount") {
                    Some(namespace) => format!("{namespace}/{}", subject.name),
                    None => subject.name.clone(),
                }
            })
            .collect();
        Value::from(names.join(", "))
    };
    vec![of("User"), of("Group"), of("ServiceAccount")]
}

fn priority_class() -> Row {
    fn cells(class: &scheduling::PriorityClass) -> Vec<Value> {
        vec![
            class.name().into(),
            class.value.into(),
            class.global_default.unwrap_or_default().into(),
            age(class),
            class.preemption_policy.clone().into(),
        ]
    }
    fn default(class: &mut scheduling::PriorityClass) {
        class.preemption_policy.get_or_insert_with(|| "PreemptLowerPriority".into());
        class.global_default.take_if(|global| !*global);
    }
    Row::new::<scheduling::PriorityClass>(
        Simple::new(cells).default(default).generation(|_, _| false),
    )
    .short(&["pc"])
}

fn storage_class() -> Row {
    fn cells(class: &storage::StorageClass) -> Vec<Value> {
        let default = class
            .metadata
            .annotations
            .as_ref()
            .and_then(|map| map.get("storageclass.kubernetes.io/is-default-class"));
        let suffix = if default.is_some_and(|value| value == "true") { " (default)" } else { "" };
        vec![
            format!("{}{suffix}", class.name()).into(),
            class.provisioner.clone().into(),
            class.reclaim_policy.clone().unwrap_or_default().into(),
            class.volume_binding_mode.clone().unwrap_or_default().into(),
            class.allow_volume_expansion.unwrap_or_default().into(),
            age(class),
        ]
    }
    fn default(class: &mut storage::StorageClass) {
        class.reclaim_policy.get_or_insert_with(|| "Delete".into());
        class.volume_binding_mode.get_or_insert_with(|| "Immediate".into());
    }
    Row::new::<storage::StorageClass>(Simple::new(cells).default(default)).short(&["sc"])
}
