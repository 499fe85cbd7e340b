{{/* The container of a pool. Arguments: root, pool (its name), values (the pool's), index (among the
     sidecars of a pod; their ports differ). */}}
{{- define "outrider.proposerContainer" -}}
{{- $sidecar := eq .values.placement "sidecar" -}}
{{- $port := add 7002 (ternary .index 0 $sidecar) -}}
{{- $health := add 9202 (ternary .index 0 $sidecar) -}}
{{- $metrics := add 9102 (ternary .index 0 $sidecar) -}}
{{- $remote := include "outrider.poolFetches" . -}}
name: {{ ternary (printf "proposer-%s" .pool) "proposer" $sidecar }}
image: {{ include "outrider.image" (dict "root" .root "service" "proposer" "device" .values.device) }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
args:
  - --host=0.0.0.0
  - --port={{ $port }}
  - --metrics-port={{ $metrics }}
  - --health-port={{ $health }}
  - --proposer-id=$(POD_NAME){{ if $sidecar }}-{{ .pool }}{{ end }}
  - --pool={{ .pool }}
  - --scorer={{ if $sidecar }}unix:/run/outrider/scorer.sock{{ else }}{{ include "outrider.scorers" .root }}{{ end }}
  - --method={{ .values.method }}
  {{- if has "draft_model" (splitList "," .values.method) }}
  - --model={{ .values.model }}
  - --dtype={{ .values.dtype }}
  - --device={{ .values.device }}
  {{- end }}
  - --start-timeout={{ .root.Values.startSeconds }}
  - --drain-grace-seconds={{ .values.drainGraceSeconds }}
  {{- with include "outrider.tlsFlags" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- with include "outrider.flags" .values.flags }}{{ . | trim | nindent 2 }}{{ end }}
env:
  {{- include "outrider.podName" .root | nindent 2 }}
  {{- if and $remote $sidecar }}
  {{- with include "outrider.hubEnv" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- end }}
  {{- with include "outrider.env" (dict "root" .root "model" (and $remote (not $sidecar)) "env" .values.env) }}{{ . | trim | nindent 2 }}{{ end }}
ports:
  - {name: {{ ternary (printf "grpc-%d" .index) "grpc" $sidecar }}, containerPort: {{ $port }}}
  - {name: {{ ternary (printf "metrics-%d" .index) "metrics" $sidecar }}, containerPort: {{ $metrics }}}
{{- if $sidecar }}
# Neither a start-up nor a readiness probe, and it downloads its model itself: a proposer must not
# keep its scorer from serving.
livenessProbe:
  grpc: {port: {{ $health }}, service: outrider.v1.ProposerService}
  timeoutSeconds: 3
  initialDelaySeconds: {{ .root.Values.startSeconds }}
  periodSeconds: 15
  failureThreshold: 4
{{- else }}
{{ include "outrider.grpcProbes" (dict "root" .root "port" $health "service" "outrider.v1.ProposerService") }}
{{- end }}
resources:
  {{- toYaml .values.resources | nindent 2 }}
securityContext:
  {{- include "outrider.containerSecurity" . | nindent 2 }}
volumeMounts:
  {{- include "outrider.mounts" .root | nindent 2 }}
  {{- if $sidecar }}
  - {name: run, mountPath: /run/outrider}
  {{- if $remote }}
  {{- with include "outrider.hubMount" .root }}{{ . | trim | nindent 2 }}{{ end }}
  {{- end }}
  {{- end }}
{{- end -}}

{{/* Whether a pool's model has to be downloaded. Arguments: values. */}}
{{- define "outrider.poolFetches" -}}
{{- if has "draft_model" (splitList "," .values.method) }}{{ include "outrider.isRemote" .values.model }}{{ end -}}
{{- end -}}
