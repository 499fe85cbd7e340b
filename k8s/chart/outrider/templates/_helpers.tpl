{{- define "outrider.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 32 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 32 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 32 | trimSuffix "-" -}}
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

{{/* Arguments: root, device. */}}
{{- define "outrider.image" -}}
{{- $image := .root.Values.image -}}
{{- $tag := printf ":%s-%s" (default .root.Chart.AppVersion $image.tag) .device -}}
{{- $digest := index $image.digests .device -}}
{{- printf "%s%s" $image.repository (ternary (printf "@%s" $digest) $tag (not (empty $digest))) -}}
{{- end -}}

{{/* A pool with its defaults. Arguments: root, pool (its name). Returns YAML. */}}
{{- define "outrider.pool" -}}
{{- $pool := index .root.Values.proposers .pool | default dict | deepCopy -}}
{{- toYaml (mergeOverwrite (deepCopy .root.Values.proposerDefaults) $pool) -}}
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

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
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

{{/* An init container that fetches a Hugging Face model. Arguments: root, container (its name),
     image, args. */}}
{{- define "outrider.fetch" -}}
name: {{ .container }}
image: {{ .image }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [python, -P, -m, outrider.models.fetch]
args: [{{ range $i, $arg := .args }}{{ if $i }}, {{ end }}{{ $arg | quote }}{{ end }}]
{{- with include "outrider.hubEnv" .root }}
env:
  {{- . | trim | nindent 2 }}
{{- end }}
resources: {requests: {cpu: 500m, memory: 1Gi}, limits: {cpu: "4", memory: 4Gi}}
securityContext:
  {{- include "outrider.containerSecurity" . | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /var/cache/outrider}
  {{- if .root.Values.model.volume }}
  - {name: models, mountPath: /models, readOnly: true} # a module may lie there, and its target not
  {{- end }}
  {{- with include "outrider.hubMount" .root }}{{ . | trim | nindent 2 }}{{ end }}
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

{{- define "outrider.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/outrider}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/outrider/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Arguments: root, component (for its certificate), claim (true: the cache is a claim), fetches
     (true: something in the pod downloads a model). */}}
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
  secret: {secretName: {{ .root.Values.model.cache.tokenSecret }}, defaultMode: 0440}
{{- end }}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "outrider.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "outrider.tlsSecret" -}}
{{- default (printf "%s-%s-tls" (include "outrider.fullname" .root) .component) .root.Values.tls.secretName -}}
{{- end -}}

{{/* What all pods share below `spec`. Arguments: root, component, pool, values (the component's),
     grouped (true: pods of a replica had better be near each other). */}}
{{- define "outrider.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
terminationGracePeriodSeconds: {{ add (.values.preStopSeconds | default 0) .values.drainGraceSeconds 15 }}
securityContext:
  {{- include "outrider.podSecurity" . | nindent 2 }}
topologySpreadConstraints:
  {{- range ternary (list "kubernetes.io/hostname") (list "kubernetes.io/hostname" "topology.kubernetes.io/zone") (not (empty .grouped)) }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "outrider.selector" $ | nindent 8 }}
  {{- end }}
{{- with .values.scheduling }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* How long start-up probes wait: longer than --start-timeout, which counts from later on and tells
     the reason, as being killed by the kubelet does not. */}}
{{- define "outrider.startPatience" -}}
{{- add .Values.startSeconds 60 -}}
{{- end -}}

{{/* All three probes of a gRPC service, on the port that has health alone and never TLS: the kubelet
     cannot present a certificate. Arguments: root, port, service. */}}
{{- define "outrider.grpcProbes" -}}
startupProbe:
  grpc: {port: {{ .port }}, service: {{ .service }}}
  timeoutSeconds: 3
  periodSeconds: 10
  failureThreshold: {{ div (include "outrider.startPatience" .root) 10 }}
readinessProbe: # NOT_SERVING while it loads and while it drains
  grpc: {port: {{ .port }}, service: {{ .service }}}
  timeoutSeconds: 3
  periodSeconds: 10
livenessProbe:
  grpc: {port: {{ .port }}, service: {{ .service }}}
  timeoutSeconds: 3
  periodSeconds: 15
  failureThreshold: 4
{{- end -}}

{{- define "outrider.podName" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- end -}}

