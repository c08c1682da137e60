{{/* The selector never changes: a DaemonSet refuses that. One release a namespace, whose name is not in it. */}}
{{- define "kvdepot.selector" -}}
app.kubernetes.io/name: kvdepot
{{- end }}

{{- define "kvdepot.labels" -}}
{{ include "kvdepot.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvdepot.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* Of both DaemonSets: where their pods run, and as whom. */}}
{{- define "kvdepot.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  {{- if .Values.peers.enabled }}
  # Of the secret: its files are root's.
  fsGroup: 10001
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Of the init containers: the only step that runs as root gives the host's directories to the daemon's user. */}}
{{- define "kvdepot.asRoot" -}}
resources:
  requests: {cpu: 10m, memory: 16Mi}
  limits: {memory: 64Mi}
securityContext:
  runAsNonRoot: false
  runAsUser: 0
  runAsGroup: 0
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"], add: ["CHOWN", "FOWNER"]}
{{- end }}

{{- define "kvdepot.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"]}
{{- end }}

{{- define "kvdepot.alive" -}}
exec: {command: ["sh", "-c", "kvdepotctl --timeout 8 status --json > /dev/null; [ $? -le 1 ]"]}
{{- end }}
