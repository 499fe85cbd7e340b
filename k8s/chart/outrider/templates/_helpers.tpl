{{- define "outrider.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := default (ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name)) .Values.fullnameOverride -}}
{{- if gt (len $full) 32 -}}
{{- printf "%s-%s" (trunc 25 $full | trimSuffix "-") (sha256sum $full | trunc 6) -}}
{{- else -}}
{{- trimSuffix "-" $full -}}
{{- end -}}
{{- end -}}

{{/* Labels that never change. Arguments: root, component, and for a proposer pool. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
outrider/pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* Arguments: root, device; engine of a scorer. */}}
{{- define "outrider.image" -}}
{{- $image := .root.Values.image -}}
{{- $kind := ternary "vllm" .device (eq (default "" .engine) "vllm") -}}
{{- $tag := printf ":%s-%s" (default .root.Chart.AppVersion $image.tag) $kind -}}
{{- $digest := index $image.digests $kind -}}
{{- printf "%s%s" $image.repository (ternary (printf "@%s" $digest) $tag (not (empty $digest))) -}}
{{- end -}}

{{/* A pool with its defaults. Arguments: root, pool (its name). Returns YAML. */}}
{{- define "outrider.pool" -}}
{{- $pool := index .root.Values.proposers .pool | default dict | deepCopy -}}
{{- $merged := mergeOverwrite (deepCopy .root.Values.proposerDefaults) $pool -}}
{{- with $pool.resources }}{{ $_ := set $merged "resources" . }}{{ end -}}
{{- toYaml $merged -}}
{{- end -}}

{{/* Resources of a scorer or proposer: its own, or on CPUs those that the embedded models need.
     Arguments: component, values. */}}
{{- define "outrider.resources" -}}
{{- $most := index (dict "scorer" (dict "cpu" "2" "memory" "3Gi") "proposer" (dict "cpu" "1" "memory" "2Gi")) .component -}}
{{- toYaml (default (dict "requests" $most "limits" $most) .values.resources) -}}
{{- end -}}

{{/* A quantity as a number. */}}
{{- define "outrider.quantity" -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]+$" (toString .) -}}
{{- mulf (trimSuffix $unit (toString .) | float64) (get $units $unit | default 1) -}}
{{- end -}}

{{/* `name: value` as --name=value; true as --name, false as --no-name. */}}
{{- define "outrider.flags" -}}
{{- range $name, $value := . }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else if kindIs "float64" $value }}
- --{{ $name }}={{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Flags of a scorer or proposer, with the demo's threads where its resources are. Arguments:
     values, threads. */}}
{{- define "outrider.ownFlags" -}}
{{- $demo := ternary (dict "threads" .threads) dict (empty .values.resources) -}}
{{- include "outrider.flags" (merge dict .values.flags $demo) -}}
{{- end -}}

{{- define "outrider.tlsFlags" -}}
{{- if .Values.tls.enabled }}
- --tls-cert=/etc/outrider/tls/tls.crt
- --tls-key=/etc/outrider/tls/tls.key
- --tls-ca=/etc/outrider/tls/ca.crt
{{- end }}
{{- end -}}

{{/* Where the scorers' headless service is. */}}
{{- define "outrider.scorers" -}}
dns:{{ include "outrider.fullname" . }}-scorer.{{ .Release.Namespace }}.svc:7001
{{- end -}}

{{/* Whether a model name has to be downloaded: "org/name", but not "/folder". */}}
{{- define "outrider.isRemote" -}}
{{- if and (contains "/" .) (not (hasPrefix "/" .)) }}true{{ end -}}
{{- end -}}

{{/* Whether resources name a GPU, a part of one, or a claim. */}}
{{- define "outrider.hasGpu" -}}
{{- range $name, $_ := .limits }}{{ if hasPrefix "nvidia.com/" $name }}true{{ end }}{{ end -}}
{{- if .claims }}true{{ end -}}
{{- end -}}

{{/* A map as YAML, with `more` over `base`, without what is null. */}}
{{- define "outrider.merged" -}}
{{- $all := mergeOverwrite (deepCopy .base) (deepCopy (default dict .more)) -}}
{{- range $key, $value := $all }}{{ if kindIs "invalid" $value }}{{ $_ := unset $all $key }}{{ end }}{{ end -}}
{{- toYaml $all -}}
{{- end -}}

{{/* What all containers have. Arguments: root, values (the component's). */}}
{{- define "outrider.container" -}}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError # the last lines of the log say why
securityContext:
  {{- include "outrider.merged" (dict "base" .root.Values.securityContext "more" .values.pod.containerSecurityContext) | nindent 2 }}
{{- with .values.pod.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Environment of a service, after podName. Arguments: root, model (true: one was fetched), env
     (the component's own). */}}
{{- define "outrider.env" -}}
{{- if .model }}
- {name: HF_HUB_OFFLINE, value: "1"} # the init container has fetched what is needed
{{- end }}
{{- with .root.Values.otel }}
{{- if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_TRACES_SAMPLER, value: parentbased_traceidratio}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ .sampleRatio | quote }}}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: "k8s.namespace.name={{ $.root.Release.Namespace }},k8s.pod.name=$(POD_NAME)"}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}
{{- with .env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* An init container that fetches a Hugging Face model. It tries again itself: where a replica is a
     group of pods, a container that restarts restarts all of them. Arguments: root, values (the
     component's), container (its name), image, args. */}}
{{- define "outrider.fetch" -}}
name: {{ .container }}
image: {{ .image }}
command: [python, -P, -m, outrider.models.fetch]
args: [{{ range .args }}{{ quote . }}, {{ end }}--retry-seconds={{ .root.Values.startSeconds }}]
{{- with printf "%s\n%s" (include "outrider.hubEnv" .root) (empty .values.env | ternary "" (toYaml .values.env)) | trim }}
env:
  {{- . | nindent 2 }}
{{- end }}
{{- $resources := deepCopy .root.Values.model.download.resources }}
{{- if not (or .claim (has "--tokenizer-only" .args)) }}
{{- $_ := set $resources "requests" (merge (dict "ephemeral-storage" .root.Values.model.cache.sizeLimit) (default dict $resources.requests)) }}
{{- end }}
resources:
  {{- toYaml $resources | nindent 2 }}
{{ include "outrider.container" . }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /var/cache/outrider}
  {{- if .root.Values.model.volume }}
  - {name: models, mountPath: /models, readOnly: true} # a module may lie there, and its target not
  {{- end }}
  {{- with include "outrider.hubMount" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- with .values.pod.volumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "outrider.hubEnv" -}}
{{- if .Values.model.cache.tokenSecret }}
- {name: HF_TOKEN_PATH, value: /etc/outrider/hub/HF_TOKEN}
{{- end }}
{{- end -}}

{{- define "outrider.hubMount" -}}
{{- if .Values.model.cache.tokenSecret }}
- {name: hub-token, mountPath: /etc/outrider/hub, readOnly: true}
{{- end }}
{{- end -}}

{{/* Arguments: root, values (the component's). */}}
{{- define "outrider.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/outrider}
{{- if .root.Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/outrider/tls, readOnly: true}
{{- end }}
{{- with .values.pod.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Arguments: root, component (for its certificate), values, claim (true: the cache is a claim),
     fetches (true: something in the pod downloads a model), sidecars. */}}
{{- define "outrider.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if not .claim }}
- name: cache # of models and of compiled kernels: the images write here and to /tmp alone
  emptyDir: {sizeLimit: {{ .root.Values.model.cache.sizeLimit }}}
{{- end }}
{{- with .root.Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and .fetches .root.Values.model.cache.tokenSecret }}
- name: hub-token
  secret: {secretName: {{ quote .root.Values.model.cache.tokenSecret }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "outrider.tlsSecret" . | quote }}, defaultMode: 0440}
{{- end }}
{{- range prepend (default list .sidecars) . }}
{{- with .values.pod.volumes }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "outrider.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "outrider.fullname" .root) .component) .root.Values.tls.secretName -}}
{{- end -}}

{{- define "outrider.serviceAccount" -}}
{{- with .Values.serviceAccount }}{{ default (ternary (include "outrider.fullname" $) "" .create) .name }}{{ end -}}
{{- end -}}

{{/* What all pods' metadata have. Arguments: root, component, pool, values, rank. */}}
{{- define "outrider.podMetadata" -}}
labels: # not the chart's version: it alone would restart every pod
  {{- include "outrider.selector" . | nindent 2 }}
  {{- with .rank }}
  outrider/rank: {{ . }}
  {{- end }}
  app.kubernetes.io/part-of: outrider
  {{- with .values.pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .values.pod.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What all pods share below `spec`. Arguments: root, component, pool, values (the component's),
     grouped (true: pods of a replica had better be near each other), sidecars. */}}
{{- define "outrider.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with include "outrider.serviceAccount" .root }}
serviceAccountName: {{ quote . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ quote . }}
{{- end }}
{{- end }}
terminationGracePeriodSeconds: {{ add (.values.preStopSeconds | default 0) .values.drainGraceSeconds 15 }}
securityContext:
  {{- include "outrider.merged" (dict "base" .root.Values.podSecurityContext "more" .values.pod.securityContext) | nindent 2 }}
{{- if not (hasKey .values.scheduling "topologySpreadConstraints") }}
topologySpreadConstraints:
  {{- range ternary (list "kubernetes.io/hostname") (list "kubernetes.io/hostname" "topology.kubernetes.io/zone") (not (empty .grouped)) }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "outrider.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- $claims := list }}
{{- range prepend (default list .sidecars) . }}{{ $claims = concat $claims (default list .values.pod.resourceClaims) }}{{ end }}
{{- with $claims }}
resourceClaims:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.scheduling }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "outrider.podName" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- end -}}

{{/* Pools in the scorers' pods, by name, as a JSON list: the place is the port's. */}}
{{- define "outrider.sidecars" -}}
{{- $names := list -}}
{{- range $pool := keys .Values.proposers | sortAlpha -}}
{{- if eq (include "outrider.pool" (dict "root" $ "pool" $pool) | fromYaml).placement "sidecar" -}}
{{- $names = append $names $pool -}}
{{- end -}}
{{- end -}}
{{- toJson $names -}}
{{- end -}}
