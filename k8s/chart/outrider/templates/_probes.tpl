{{/* Probes: those of the gateway, over HTTP, are in gateway.yaml. */}}

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
